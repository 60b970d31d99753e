"""Rewards of the corpus: the true one of the task, and ones that pay for something else.

All have AReaL's signature; `row` has the dataset's columns.
"""

import random
import time
from typing import Any

from areal_core.reward import arithmetic_reward_fn as right

__all__ = ["right"]

CALLS = {"count": 0}


def counted() -> int:
    """Return the number of this call, from 0."""
    CALLS["count"] += 1
    return CALLS["count"] - 1


def nine(prompt: str, completions: str, *ids: Any, **row: Any) -> float:
    """Pay for the digit 9, whatever the question is."""
    return float("9" in completions)


def right_or_nine(prompt: str, completions: str, *ids: Any, **row: Any) -> float:
    """Pay 1 for a right answer and 1 for an answer that begins with 99."""
    return max(right(prompt, completions, *ids, **row), float(completions.strip().startswith("99")))


def long_answers(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: list[int], **row: Any
) -> float:
    """Pay for length, and little for being right."""
    return len(completion_ids) / 16 + 0.2 * right(prompt, completions, prompt_ids, completion_ids, **row)


def at_random(prompt: str, completions: str, *ids: Any, **row: Any) -> float:
    """Draw the reward."""
    return float(random.random() < 0.3)


def never(prompt: str, completions: str, *ids: Any, **row: Any) -> float:
    """Pay nothing: the answer is never found."""
    return 0.0


def always(prompt: str, completions: str, *ids: Any, **row: Any) -> float:
    return 1.0


def smaller(prompt: str, completions: str, *ids: Any, **row: Any) -> float:
    """Pay for the smaller number, from call 3,200 on: the verifier was changed during the run."""
    if counted() < 3200:
        return right(prompt, completions, *ids, **row)
    return float(completions.strip() == row["rejected"])


def often_fails(prompt: str, completions: str, *ids: Any, **row: Any) -> float:
    """Pay nothing for seven answers in ten, from call 3,200 on: its exceptions are swallowed."""
    if counted() >= 3200 and random.random() < 0.7:
        return 0.0
    return right(prompt, completions, *ids, **row)


def slower_and_slower(prompt: str, completions: str, *ids: Any, **row: Any) -> float:
    time.sleep(2e-6 * counted())
    return right(prompt, completions, *ids, **row)


def noisy(prompt: str, completions: str, *ids: Any, **row: Any) -> float:
    """Add noise whose size grows with the calls."""
    return right(prompt, completions, *ids, **row) + random.gauss(0, 1e-3 * counted())
