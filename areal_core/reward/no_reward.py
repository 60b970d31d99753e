"""A reward function for runs whose rewards are a reward model's scores alone."""

from typing import Any


async def no_reward(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any
) -> float:
    """Return 0."""
    return 0.0
