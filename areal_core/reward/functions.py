"""Verifiable rewards, and the lookup of reward functions by name.

A reward function is `f(prompt, completions, prompt_ids, completion_ids, **row) -> float`: two
texts, their tokens, and the fields of the dataset's row.
"""

import logging
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from areal_core.config.import_paths import import_object
from areal_core.errors import RewardError

RewardFn = Callable[..., float]
GSM8K_ANSWER = re.compile(r"####\s*(.+)")
INTEGER = re.compile(r"-?\d+")
BRACKETED_NUMBER = re.compile(r"\[([0-9.]+)\]")
BRACKETED = re.compile(r"\[([^\]]+)\]")
NUMBER = re.compile(r"-?\d*\.?\d+")
REASONED = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
FORMAT_SHARE = 0.1  # of the reward for reasoned answers
CALCULATION = re.compile(r"[\d)}]\s*(?:\^|\*|/|\+|-|\\cdot|\\times|\\div)")


def gsm8k_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **row: Any
) -> float:
    """Return 1.0 if the completion's final answer equals the expected one, else 0.0.

    The expected answer is the text after '####' in `answer`, or `answer` itself. Where it is an
    integer, a calculation is no final answer: math_verify would evaluate the last one of a text
    that ends too early ("she makes 9 * 2"), and take minutes for 9**9**9**9.

    The time-outs of math_verify are off: they use signals, which work only in a main thread. The
    pool has its own.
    """
    parse, verify, boxed_first = _math_verify()
    gold = GSM8K_ANSWER.search(answer)
    expected = (gold.group(1) if gold else answer).strip().replace(",", "")
    parsed = parse(completions, boxed_first, parsing_timeout=None)
    if INTEGER.fullmatch(expected) and any(
        CALCULATION.search(text) for text in parsed if isinstance(text, str)
    ):
        return 0.0
    return float(
        verify(
            parse(f"\\boxed{{{expected}}}", parsing_timeout=None),
            parsed,
            float_rounding=6,
            timeout_seconds=None,
        )
    )


def clevr_count_70k_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **row: Any
) -> float:
    found = BRACKETED_NUMBER.findall(completions)
    return float(bool(found) and found[-1] == answer.strip())


def geometry3k_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **row: Any
) -> float:
    """Return 1.0 if the completion's answer equals `answer` as mathematics, else 0.0.

    It is the last box, else the last text in square brackets, else the last number.
    """
    boxed = last_boxed(completions)
    return float(_is_equal(boxed if boxed is not None else _bracketed_or_number(completions), answer))


def reasoned_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **row: Any
) -> float:
    """Return 0.9 for a right answer in the last box, and 0.1 for reasoning in its tags before it.

    For geometry3k and virl39k, whose prompts request `<think> </think>` and `\\boxed{}`.
    """
    boxed = last_boxed(completions)
    right = boxed is not None and _is_equal(boxed, answer)
    has_format = REASONED.fullmatch(completions) is not None
    return (1 - FORMAT_SHARE) * right + FORMAT_SHARE * has_format


def last_boxed(text: str) -> str | None:
    begin = text.rfind("\\boxed{")
    depth = 0
    for place in range(begin + len("\\boxed"), len(text)) if begin >= 0 else ():
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[begin + len("\\boxed{") : place]
    return None


def _bracketed_or_number(text: str) -> str:
    bracketed = BRACKETED.findall(text)
    return (bracketed or NUMBER.findall(text.replace(",", "")) or [""])[-1]


def _is_equal(found: str, answer: str) -> bool:
    """Return whether two texts are the same mathematics; `answer` may be in a box or brackets."""
    parse, verify, boxed_first = _math_verify()
    boxed = last_boxed(answer)
    expected = answer if boxed is None else boxed
    if not found.strip():
        return False
    if found.strip() == expected.strip():
        return True
    ours, theirs = (
        parse(f"\\boxed{{{text}}}", boxed_first, parsing_timeout=None) for text in (expected, found)
    )
    return bool(verify(ours, theirs, float_rounding=6, timeout_seconds=None))


def arithmetic_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **row: Any
) -> float:
    """Return 1.0 if the completion is the text `answer` and nothing else, else 0.0.

    White space around them does not count; "4" and "4.0" are different.
    """
    return float(completions.strip() == answer.strip())


async def no_reward(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any
) -> float:
    """Return 0.0, for runs whose rewards are a reward model's scores alone.

    It is asynchronous, so that no worker process is started for it.
    """
    return 0.0


def load_reward_fn(reward_fn: str | RewardFn) -> RewardFn:
    """Return a callable unchanged, or the function with a given name.

    Names are import paths (`import_object`). Raises RewardError.
    """
    if callable(reward_fn):
        return reward_fn
    found = import_object(reward_fn, "reward function", RewardError)
    if not callable(found):
        raise RewardError(f"reward function {reward_fn!r} is a {type(found).__name__}, not a function")
    return found


def name_of_reward_fn(reward_fn: str | RewardFn) -> str:
    """Return the name with which `load_reward_fn` finds this function. Raises RewardError."""
    if isinstance(reward_fn, str):
        return reward_fn
    name, module = reward_fn.__qualname__, reward_fn.__module__
    if "." in name or "<" in name:
        raise RewardError(
            f"reward function {name} of {module} is nested or a lambda; another process cannot find it: "
            "define it at the top level of a module"
        )
    if module == "__main__":
        file = sys.modules["__main__"].__file__
        if file is None:
            raise RewardError(f"reward function {name} was defined interactively: define it in a file")
        return f"{Path(file).resolve()}:{name}"
    return f"{module}:{name}"


@cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., bool], list[Any]]:
    """Import math_verify on first use: it takes two seconds, and the trainer never needs it."""
    # It warns at every call that its time-outs are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    return parse, verify, [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
