"""Skills for coding assistants: a folder for each symptom of a run, with its `SKILL.md`."""
