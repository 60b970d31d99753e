"""Loading and checking of agents: objects with `async def run(self, data, **extra_kwargs)`."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_core.agent.errors import NotAnAgent
from areal_core.config.import_paths import hint_for, ours

EXPECTED = "an agent has `async def run(self, data, **extra_kwargs)`"


def load_agent(agent: Any, arguments: Mapping[str, Any] | None = None) -> Any:
    """Return an agent from an instance, a class, or the path of either.

    A path is 'pkg.mod:Name', 'pkg.mod.Name' or 'file.py:Name'.

    Raises:
        NotAnAgent: the path names nothing, or it has no asynchronous `run`.
    """
    found = import_object(agent) if isinstance(agent, str) else agent
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
    """Return the name of an agent in messages."""
    if isinstance(agent, str):
        return agent
    kind = agent if isinstance(agent, type) else type(agent)
    return f"{kind.__module__}:{kind.__qualname__}"


def import_object(path: str) -> Any:
    """Import the object at 'pkg.mod:Name', 'pkg.mod.Name' or 'file.py:Name'. Raises NotAnAgent."""
    place, separator, name = ours(path).rpartition(":" if ":" in path else ".")
    if not separator or not place or not name:
        raise NotAnAgent(
            f"agent {path!r} is not an import path; expected package.module:Class or file.py:Class"
        )
    try:
        module = import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ImportError as error:
        raise NotAnAgent(f"agent {path!r}: {place} cannot be imported: {error}{hint_for(path)}") from error
    if name not in vars(module):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise NotAnAgent(
            f"agent {path!r}: {place} has no {name}; its classes are {', '.join(classes) or 'none'}"
        )
    return vars(module)[name]


def import_file(path: Path) -> Any:
    """Import a module from a file outside of packages, once.

    Raises NotAnAgent if it does not exist.
    """
    if not path.is_file():
        raise NotAnAgent(f"there is no file {path}")
    name = f"agent_file_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path.resolve()):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses of the file look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
