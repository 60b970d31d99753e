"""Options as dataclass fields, each with a default, a help text and optional choices or limits."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

REQUIRED = "???"  # OmegaConf's marker of a value that the user must give


@dataclass(frozen=True)
class Limits:
    """The numbers that an option may have, in words and as a predicate, which is False for NaN."""

    words: str
    hold: Callable[[float], bool]


FINITE = Limits("a finite number", math.isfinite)
AT_LEAST_0 = Limits("0 or more", lambda value: value >= 0)
AT_LEAST_1 = Limits("at least 1", lambda value: value >= 1)
ABOVE_1 = Limits("above 1", lambda value: value > 1)
ABOVE_0 = Limits("above 0", lambda value: value > 0)
SHARE = Limits("0 to 1", lambda value: 0 <= value <= 1)
POSITIVE_SHARE = Limits("above 0, up to 1", lambda value: 0 < value <= 1)
DECAY = Limits("0 or more, and below 1", lambda value: 0 <= value < 1)


def option(default: Any, help: str, choices: tuple[Any, ...] = (), limits: Limits | None = None) -> Any:
    """Return a field with a plain default.

    `check_config` refuses values outside of `choices` and `limits`.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "limits": limits})


def section(factory: Callable[[], Any], help: str) -> Any:
    """Return a field whose default is a new object: a nested section, a list or a dict."""
    return field(default_factory=factory, metadata={"help": help, "choices": (), "limits": None})


Role = Literal["train", "rollout"]
ROLLOUT_SECTIONS = ("rollout", "gconfig", "sglang", "vllm", "cluster")  # that rollouts alone read
