"""Rules: each looks for the pattern of one label. `labels.toml` explains the patterns."""
