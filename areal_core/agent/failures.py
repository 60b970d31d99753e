"""Whether the model or the code failed an episode, from the exception that ended the agent's run.

What the model does wrong is an outcome: its tokens keep their place in the batch, with
`rollout.agent.failed_reward`. Everything else stops the run. An exception is the model's only on
evidence, so an unknown one counts as a fault of the code. Evidence is one of these:

1. its class, or a class that it inherits from, is in `MODEL_FAILURES` or in the option
   `rollout.agent.failure_errors`; classes are named, so that no framework is imported;
2. it is a parser's or validator's error about a value that the model sampled in this session;
3. its message quotes the proxy's refusal of a prompt that has grown too long in this session.

An exception without evidence is judged by the one that it was raised from (`raise ... from ...`),
an exception group by all of its members. `__context__` is not evidence: a KeyError in the handler
of a framework's error is a fault of the code. So is any error of the engine.
"""

import json
import tomllib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from areal_core.agent.conversation import Interaction

# Package and class of a framework's exceptions, and what the model did. Classes that frameworks
# raise for errors of a tool, a connection or a guard of the user are not here.
MODEL_FAILURES: dict[str, str] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
# The values of a batch's `failure`: the index in this tuple; None where the model did not fail.
FAILURES = (None, "declared", "invalid_output", "too_many_turns", "prompt_too_long", "truncated")


@dataclass(frozen=True)
class Raised:
    """What an exception says, as JSON types: it may come from the process of an agent.

    `classes` are 'package.Class' of the exception and of the classes that it inherits from.
    `unreadable` are the values that a parser or validator refused. `origins` are the exceptions of
    a group, or the one that it was raised from.
    """

    classes: list[str]
    message: str
    unreadable: list[Any] = field(default_factory=list)
    is_group: bool = False
    origins: list["Raised"] = field(default_factory=list)


def describe_raised(error: BaseException) -> Raised:
    """Return what an exception says, without importing the framework that raised it."""
    is_group = isinstance(error, BaseExceptionGroup)
    origins = error.exceptions if isinstance(error, BaseExceptionGroup) else (error.__cause__,)
    return Raised(
        classes=[f"{c.__module__.partition('.')[0]}.{c.__name__}" for c in type(error).__mro__],
        message=str(error),
        unreadable=unreadable_values(error),
        is_group=is_group,
        origins=[describe_raised(origin) for origin in origins if origin is not None],
    )


def unreadable_values(error: BaseException) -> list[Any]:
    if isinstance(error, JSONDecodeError):
        return [error.doc]
    kind = type(error)
    if (kind.__module__.partition(".")[0], kind.__name__) != ("pydantic_core", "ValidationError"):
        return []
    refused: Any = error
    return [each["input"] for each in refused.errors(include_url=False, include_context=False)]


def failure_of(
    raised: Raised,
    interactions: Sequence[Interaction],
    refusals: Collection[str],
    added: Collection[str] = (),
) -> str | None:
    """Return what the model did wrong, a member of `FAILURES`; None for a fault of the code.

    Args:
        raised: the exception that ended the run of the agent.
        interactions: the answered calls of its session.
        refusals: the proxy's refusals of prompts of the session that had grown too long.
        added: further class names of `rollout.agent.failure_errors`: 'package.Class' or 'Class'.
    """
    if raised.is_group:
        kinds = [failure_of(origin, interactions, refusals, added) for origin in raised.origins]
        return kinds[0] if all(kinds) else None
    kind = next((MODEL_FAILURES[name] for name in raised.classes if name in MODEL_FAILURES), None)
    if kind is None and any(name in added or name.partition(".")[2] in added for name in raised.classes):
        kind = "declared"
    if kind is None and any(refusal in raised.message for refusal in refusals):
        return "prompt_too_long"
    if kind is None and raised.unreadable and is_sampled(raised.unreadable, interactions):
        kind = "invalid_output"
    if kind == "invalid_output" and interactions and interactions[-1].response.stop_reason == "length":
        return "truncated"
    if kind is None and raised.origins:
        return failure_of(raised.origins[0], interactions, refusals, added)
    return kind


def is_sampled(values: Sequence[Any], interactions: Sequence[Interaction]) -> bool:
    """Whether one answer of the model contains all of the values."""
    return any(
        all(value in sampled for value in values)
        for interaction in interactions
        for sampled in [list(sampled_values(interaction))]
    )


def sampled_values(interaction: Interaction) -> Iterator[Any]:
    message = interaction.message
    for text in (message.content, *(call.arguments for call in message.tool_calls)):
        yield text
        yield text.strip()
        try:
            yield from values_in(json.loads(text))
        except ValueError:
            continue


def values_in(value: Any) -> Iterator[Any]:
    yield value
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for member in members:
        yield from values_in(member)
