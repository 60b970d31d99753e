"""The demo's own runs: a tiny model that learns to add, first from examples, then from reward."""
