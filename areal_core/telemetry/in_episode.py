"""Statistics and trace scopes of a user's own workflow or agent.

    from areal_core.telemetry.in_episode import scalar, trace_scope, traced

    with trace_scope("search"):
        pages = index.search(query)
    scalar(num_pages=len(pages))

    @traced
    async def read(page): ...

Numbers are kept with the episode that records them, in any task or thread that it starts through
asyncio, and reported with the step that trains on it: `workflow/NAME`, the mean, and
`workflow/NAME__count`. Scopes are drawn in the episode's track of the trace. Outside of an episode,
or without a trace, both do nothing.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from areal_core.telemetry.trace import current_trace

P = ParamSpec("P")
T = TypeVar("T")
Scalars = dict[str, list[float]]

_SCALARS: ContextVar[Scalars | None] = ContextVar("episode_scalars", default=None)


def scalar(**values: float) -> None:
    """Record numbers of this episode, reported with the step that trains on it.

    Outside of an episode they are checked and not kept.

    Args:
        values: numbers by name; `workflow/NAME` is their mean, `workflow/NAME__count` their number.

    Raises:
        ValueError: one is not finite, or is text that is no number.
        TypeError: one is neither a number nor text.
    """
    kept = _SCALARS.get()
    for name, value in values.items():
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"the statistic {name} of a workflow is {number}; expected a finite number")
        if kept is not None:
            kept.setdefault(name, []).append(number)


@contextmanager
def collecting() -> Iterator[Scalars]:
    """Collect what `scalar` records inside, by name."""
    kept: Scalars = {}
    token = _SCALARS.set(kept)
    try:
        yield kept
    finally:
        _SCALARS.reset(token)


@contextmanager
def trace_scope(name: str, **args: str | int | float | bool) -> Iterator[None]:
    """Draw the body in the trace, within the current episode. Without a trace it does nothing.

    Args:
        name: of the scope.
        args: shown with it.
    """
    trace = current_trace()
    if trace is None:
        yield
        return
    with trace.span(name, name, None, **args):
        yield


def traced(function: Callable[P, T]) -> Callable[P, T]:
    """Draw each call of a function, which may be asynchronous, as a scope of its name.

    A decorator; see `trace_scope`.
    """
    name = function.__name__
    if not inspect.iscoroutinefunction(function):
        return trace_scope(name)(function)

    @wraps(function)
    async def scoped(*args: P.args, **kwargs: P.kwargs) -> Any:
        with trace_scope(name):
            return await function(*args, **kwargs)

    return cast(Callable[P, T], scoped)
