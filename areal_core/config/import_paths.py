"""Objects named by import paths, and what the paths of upstream AReaL 0.3 to 2.0 are called here.

`import_object` imports the object of a path in a string (a workflow, an agent, a reward function, a
loss), and translates a path of upstream. A script that imports from `areal` itself gets the lines
to write instead (`replacements`).
"""

import ast
import importlib
import sys
import tomllib
import traceback
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from areal_core.errors import ConfigError

PACKAGES = ("areal", "realhf")
PAGE = "docs/coming_from_areal.md lists what there is"
PATHS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
# By the module that defines a name; packages above it may export it, too (`defined_at`).
OURS = {path: name for paths in PATHS.values() for path, name in paths.items()}

OF_FILE = "file_of_"  # begins the name of a module that was imported from a file by its path


def import_object(path: str, what: str, raised: type[ValueError] = ConfigError) -> Any:
    """Return the object at 'pkg.mod:Name', 'pkg.mod.Name' or 'file.py:Name'.

    Args:
        what: what it is, for the error: "agent".

    Raises:
        raised: it is no such path, or nothing is there.
    """
    place, name = split_path(path, what, raised)
    try:
        module = import_file(place) if place.endswith(".py") else importlib.import_module(place)
    except ImportError as error:
        raise raised(f"{what} {path!r}: {place} cannot be imported: {error}{hint_for(path)}") from error
    except Exception as error:  # of the user's code, which runs as it is imported
        frames, stem = traceback.extract_tb(error.__traceback__), Path(place).stem.rpartition(".")[2]
        at = [frame for frame in frames if Path(frame.filename).stem == stem][-1:] or frames[-1:]
        said = f"{type(error).__name__}: {error} ({Path(at[0].filename).name}:{at[0].lineno})"
        raise raised(f"{what} {path!r}: {place} cannot be imported: it raised {said}") from error
    if name not in vars(module):
        named = ((key, value) for key, value in vars(module).items() if callable(value) and key[0] != "_")
        root = module.__name__.split(".")[0]
        names = [key for key, value in named if getattr(value, "__module__", "").split(".")[0] == root]
        raise raised(
            f"{what} {path!r}: {place} has no {name}; its functions and classes are {', '.join(names) or 'none'}"
        )
    return vars(module)[name]


def split_path(path: str, what: str, raised: type[ValueError] = ConfigError) -> tuple[str, str]:
    """Return the module or file of an import path, and the name in it; as `import_object`."""
    known = ours(path)
    place, separator, name = known.rpartition(":" if ":" in known else ".")
    if not separator or not place or not name:
        raise raised(f"{what} {path!r} is not an import path; expected package.module:Name or file.py:Name")
    return place, name


def find_file(name: str) -> Path | None:
    """Return the absolute path of a file below the current folder or `sys.path`, None without."""
    found = (path for top in ("", *sys.path) if (path := Path(top, name)).is_file())
    return next((path.resolve() for path in found), None)


def import_file(name: str) -> ModuleType:
    """Import a file by its path, once; relative ones are below the current folder or `sys.path`.

    Its folder is added to the end of `sys.path`, for what it imports itself.

    Raises ImportError: there is no such file.
    """
    path = find_file(name)
    if path is None:
        raise ImportError(f"there is no file {name}")
    key = f"{OF_FILE}{path.stem}"
    if key in sys.modules and sys.modules[key].__file__ == str(path):
        return sys.modules[key]
    spec = spec_from_file_location(key, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[key] = module  # before it runs: dataclasses of the file look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module


def ours(path: str) -> str:
    """Return our path of a name of upstream, with its separator; any other path unchanged."""
    is_colon = ":" in path
    found = OURS.get(defined_at(path.replace(":", ".")))
    if found is None:
        return path
    module, _, name = found.rpartition(".")
    return f"{module}:{name}" if is_colon else found


def defined_at(path: str) -> str:
    if path in OURS:
        return path
    package, _, name = path.rpartition(".")
    if package.count(".") > 1:
        return path
    return next((full for full in OURS if full.startswith(f"{package}.") and full.endswith(f".{name}")), path)


def hint_for(path: str) -> str:
    """Return the end of the message on a path of upstream that has no equivalent; "" for others."""
    dotted = path.replace(":", ".")
    if dotted.split(".")[0] not in PACKAGES or dotted in OURS:
        return ""
    return f"; AReaL's {dotted} has no equivalent here ({PAGE})"


def replacements(script: str) -> Iterator[str]:
    """Yield one sentence for each import from an upstream that is not installed.

    Args:
        script: the text of a Python file; one that cannot be parsed yields nothing.
    """
    if any(find_spec(package) for package in PACKAGES):
        return
    try:
        nodes = ast.parse(script).body
    except SyntaxError:  # the run reports it with its line
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for path in paths:
            if path.split(".")[0] in PACKAGES:
                yield f"line {node.lineno}: {path}: {instead_of(path)}"


def instead_of(path: str) -> str:
    found = OURS.get(defined_at(path))
    if found is None:
        return f"no equivalent ({PAGE})"
    module, _, name = found.rpartition(".")
    return f"from {module} import {name}"
