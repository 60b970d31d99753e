"""Import paths of upstream AReaL, of 0.3 to 2.0, and what they are called here.

Paths in strings (workflows, agents, reward functions) are translated where they are imported. A
script that imports from `areal` itself gets the lines to write instead (`replacements`).
"""

import ast
import difflib
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("areal", "realhf")
PAGE = "docs/coming_from_areal.md lists what there is"
PATHS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
WORKFLOWS, REWARDS = PATHS["workflows"], PATHS["rewards"]
# By the module that defines a name; packages above it may export it, too (`defined_at`).
OURS = WORKFLOWS | REWARDS | PATHS["of_scripts"]


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
    similar = nearest(dotted)
    if similar is None:
        return f"; AReaL's {dotted} has no equivalent here ({PAGE})"
    return f"; AReaL's {dotted} has no equivalent here: the nearest is {OURS[similar]}, for {similar}"


def nearest(path: str) -> str | None:
    """Return the workflow, agent or reward function with an equivalent that is most like `path`.

    One of the same package is always near enough, another only with a similar name.
    """
    known = WORKFLOWS | REWARDS
    package = ".".join(path.split(".")[:2])
    same = [full for full in known if full.startswith(f"{package}.")]
    if same:
        return difflib.get_close_matches(path, same, n=1, cutoff=0)[0]
    by_name = {full.rpartition(".")[2]: full for full in known}
    alike = difflib.get_close_matches(path.rpartition(".")[2], by_name, n=1)
    return by_name[alike[0]] if alike else None


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
