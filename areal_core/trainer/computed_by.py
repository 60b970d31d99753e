"""The identity of what computes a step: its import path, its file, and digests of its source."""

import functools
import json
import sys
from contextlib import suppress
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areal_core.config.import_paths import OF_FILE, find_file, split_path
from areal_core.config.source_digests import digests
from areal_core.safety.secrets import masker
from areal_core.trainer.objective import PolicyObjective


def identity(value: Any, built: PolicyObjective) -> dict[str, Any]:
    """Return the identity of a function, of an object by its class, or of what a path names.

    Args:
        built: the objective that the options of the run describe.

    Returns:
        `import_path`; `file` and `sha256`, None if it has no file, else with `digests`. Of an
        objective that a script has set also `arguments`, None if it cannot be built from them.
    """
    if isinstance(value, str):
        path, file = value, file_of(split_path(value, "import path")[0])
    else:
        while isinstance(value, functools.partial):
            value = value.func
        kind = value if hasattr(value, "__qualname__") else type(value)
        name = getattr(sys.modules.get(kind.__module__), "__file__", None)
        file = None if name is None else Path(name).absolute()
        is_script = file is not None and kind.__module__.startswith(("__main__", OF_FILE))
        path = (
            f"{file.name}:{kind.__qualname__}"
            if is_script and file
            else f"{kind.__module__}.{kind.__qualname__}"
        )
    found: dict[str, Any] = {"import_path": path, "file": None, "sha256": None}
    if file is not None and file.suffix == ".py" and file.is_file():
        found |= {"file": masker().text(str(file)), **digests(file)}
    if isinstance(value, PolicyObjective):
        found["arguments"] = arguments_of(value, built)
    return found


def file_of(place: str) -> Path | None:
    """Return the file of a module or of a path, None if there is none."""
    if place.endswith(".py"):
        return find_file(place)
    with suppress(ImportError, ValueError):
        return Path(spec.origin) if (spec := find_spec(place)) and spec.origin else None
    return None


def arguments_of(objective: PolicyObjective, built: PolicyObjective) -> dict[str, Any] | None:
    """Return what an objective adds to one that the options describe.

    None if there is more to it: other options than those of the run, a replaced method, a value
    that is no JSON.
    """
    ours = {field.name for field in fields(PolicyObjective)}
    added = {name: value for name, value in vars(objective).items() if name not in ours}
    is_known = added.keys() <= {field.name for field in fields(objective)}
    same = all(getattr(objective, name) == getattr(built, name) for name in ours)
    if type(objective) is PolicyObjective or not (is_known and same):
        return None
    try:
        return added if json.loads(json.dumps(added)) == added else None
    except (TypeError, ValueError):
        return None
