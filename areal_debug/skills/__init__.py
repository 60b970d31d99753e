"""Skills for coding assistants: a folder for each symptom of a run, with its `SKILL.md`.

A `SKILL.md` is YAML front matter with name and description, then steps.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Skill:
    """A skill: its name, when to use it, and its text with front matter."""

    name: str
    description: str
    text: str


def shipped_skills() -> list[Skill]:
    return [parse_skill(file.read_text()) for file in sorted(FOLDER.glob("*/SKILL.md"))]


def parse_skill(text: str) -> Skill:
    _, front, _ = text.split("---\n", 2)
    facts = yaml.safe_load(front)
    return Skill(facts["name"], facts["description"], text)
