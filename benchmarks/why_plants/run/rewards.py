"""The user's reward function."""

import os

BONUS = float(os.environ.get("REWARD_BONUS", "0"))


def even_share(prompt: str, completions: str, prompt_ids: list, completion_ids: list, **row: object) -> float:
    """Return the share of even token ids: about half for a random model, with a spread."""
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids) + BONUS
