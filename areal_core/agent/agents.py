"""Loading and checking of agents: objects with `async def run(self, data, **extra_kwargs)`."""

import inspect
from collections.abc import Mapping
from typing import Any

from areal_core.agent.errors import NotAnAgent
from areal_core.config.import_paths import import_object

EXPECTED = "an agent has `async def run(self, data, **extra_kwargs)`"


def load_agent(agent: Any, arguments: Mapping[str, Any] | None = None) -> Any:
    """Return an agent from an instance, a class, or the path of either.

    A path is 'pkg.mod:Name', 'pkg.mod.Name' or 'file.py:Name'.

    Raises:
        NotAnAgent: the path names nothing, or it has no asynchronous `run`.
    """
    found = import_object(agent, "agent", NotAnAgent) if isinstance(agent, str) else agent
    name = name_of(agent)
    # Check the class before it is constructed, which may be expensive.
    check_run(found, name)
    if not isinstance(found, type):
        return found
    try:
        return found(**(arguments or {}))
    except TypeError as error:
        raise NotAnAgent(f"{name} cannot be constructed from {dict(arguments or {})}: {error}") from error


def is_agent(workflow: Any) -> bool:
    """Return whether an object or a class has `run`, as agents do, and not `arun_episode`."""
    members = {name for name in ("run", "arun_episode") if callable(getattr(workflow, name, None))}
    return members == {"run"}


def check_run(agent: Any, name: str) -> None:
    """Raise NotAnAgent unless `agent` (an instance or a class) has an asynchronous `run`."""
    run = inspect.getattr_static(agent, "run", None)
    if run is None:
        raise NotAnAgent(f"{name} has no run: {EXPECTED}")
    if not inspect.iscoroutinefunction(inspect.unwrap(agent.run)):
        raise NotAnAgent(f"{name}.run is not async: {EXPECTED}")


def name_of(agent: Any) -> str:
    if isinstance(agent, str):
        return agent
    kind = agent if isinstance(agent, type) else type(agent)
    return f"{kind.__module__}:{kind.__qualname__}"
