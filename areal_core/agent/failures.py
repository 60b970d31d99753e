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


def classes_of(error: BaseException) -> list[str]:
    """Return 'package.Class' of an exception and of the classes that it inherits from.

    No framework is imported for it.
    """
    return [f"{c.__module__.partition('.')[0]}.{c.__name__}" for c in type(error).__mro__]


def unreadable_values(error: BaseException) -> list[Any]:
    """Return the values that a parser or validator refused; none of another exception."""
    if isinstance(error, JSONDecodeError):
        return [error.doc]
    kind = type(error)
    if (kind.__module__.partition(".")[0], kind.__name__) != ("pydantic_core", "ValidationError"):
        return []
    refused: Any = error
    return [each["input"] for each in refused.errors(include_url=False, include_context=False)]


def failure_of(
    error: BaseException,
    interactions: Sequence[Interaction],
    refusals: Collection[str],
    added: Collection[str] = (),
) -> str | None:
    """Return what the model did wrong, a member of `FAILURES`; None for a fault of the code.

    Args:
        error: the exception that ended the run of the agent.
        interactions: the answered calls of its session.
        refusals: the proxy's refusals of prompts of the session that had grown too long.
        added: further class names of `rollout.agent.failure_errors`: 'package.Class' or 'Class'.
    """
    if isinstance(error, BaseExceptionGroup):
        kinds = [failure_of(member, interactions, refusals, added) for member in error.exceptions]
        return kinds[0] if all(kinds) else None
    classes, unreadable = classes_of(error), unreadable_values(error)
    kind = next((MODEL_FAILURES[name] for name in classes if name in MODEL_FAILURES), None)
    if kind is None and any(name in added or name.partition(".")[2] in added for name in classes):
        kind = "declared"
    if kind is None and any(refusal in str(error) for refusal in refusals):
        return "prompt_too_long"
    if kind is None and unreadable and is_sampled(unreadable, interactions):
        kind = "invalid_output"
    if kind == "invalid_output" and interactions and interactions[-1].response.stop_reason == "length":
        return "truncated"
    if kind is None and error.__cause__ is not None:
        return failure_of(error.__cause__, interactions, refusals, added)
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
