"""The source files that determine a run: its script, what that imports, what its config names.

Of installed packages, only modules that the config names are read; the trainer is always read, as
somebody may have changed it. The debugging packages only observe a run.
"""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from replayer.commits.references import module_of
from replayer.preflight.checks import Status

TRAINER = "areal_core"
OBSERVERS = ("areal_debug", "recorder", "replayer", "consistency", "hangdoctor")
INSTALLED = ("site-packages", "dist-packages")
OF_FUNCTIONS = ("_fn", "_fn_path", "workflow", "agent", "reward", "cls_path", "should_accept")
IN_FILE = re.compile(r"^(?P<file>[^:\s]+\.py):(?P<name>\w+)$")
DOTTED = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")
ACCEPTED = "# deterministic:"  # a comment of the user, with the reason


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


@dataclass(frozen=True)
class Hit:
    """Something in a file that may differ from run to run."""

    node: ast.expr | ast.stmt
    check: str
    status: Status
    seen: str
    next_step: str


@dataclass
class Source:
    """A parsed file.

    Attributes:
        shown: its path as it is printed.
        group: files that share a process, and so its seeded generators.
        is_data: it computes data itself: rewards, episodes.
    """

    path: Path
    shown: str
    group: str
    is_data: bool
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes, those of a line before those of the next where they are calls."""
        return list(ast.walk(self.tree))

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls, in order of their lines."""
        found = [node for node in self.nodes if isinstance(node, ast.Call)]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Each node's parent."""
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    @cached_property
    def scopes(self) -> dict[ast.AST, list[ast.AST]]:
        """The nodes of the module and of each function, without those of functions inside it."""
        found: dict[ast.AST, list[ast.AST]] = {self.tree: []}
        waiting: list[tuple[ast.AST, ast.AST]] = [(child, self.tree) for child in self.tree.body]
        while waiting:
            node, scope = waiting.pop()
            found[scope].append(node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                scope = node
                found[node] = []
            waiting += [(child, scope) for child in ast.iter_child_nodes(node)]
        return found

    @cached_property
    def imported(self) -> dict[str, str]:
        """Local names of imports, and what they stand for: `np` for `numpy`."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    full = alias.name if alias.asname else alias.name.split(".")[0]
                    found[alias.asname or full] = full
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return found

    @cached_property
    def accepted_lines(self) -> set[int]:
        """Lines whose comment, there or just above, gives a reason why they are deterministic."""
        lines = [i for i, line in enumerate(self.text.splitlines(), 1) if ACCEPTED in line]
        return {at for line in lines for at in (line, line + 1)}

    def dotted(self, node: ast.AST) -> str:
        """Return the full name of an expression such as `np.random.rand`; "" for others."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.imported.get(node.id, node.id), *reversed(names)])

    def name_of(self, call: ast.Call) -> str:
        """Return the full name of the called function; "" for a method of an expression."""
        return self.dotted(call.func)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the nearest first."""
        while (node_above := self.parents.get(node)) is not None:
            node = node_above
            yield node

    def function_of(self, node: ast.AST) -> ast.AST:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)
        return next(above for above in self.above(node) if isinstance(above, kinds))


class Locator:
    """Finds the files of modules that belong to a user's own code, or to the trainer."""

    def __init__(self, script: Path | None) -> None:
        self.roots = [Path.cwd()] if script is None else [script.resolve().parent, Path.cwd()]
        self.of_package: dict[str, Path | None] = {}

    def root_of(self, top: str, installed: bool) -> Path | None:
        """Return the folder that holds a top-level module; None if it is not to be read."""
        for root in self.roots:
            if (root / f"{top}.py").is_file() or (root / top).is_dir():
                return root
        if top in sys.stdlib_module_names:
            return None
        if top not in self.of_package:
            try:
                spec = importlib.util.find_spec(top)
            except (ImportError, ValueError):
                spec = None
            places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
            self.of_package[top] = Path(places[0]) if places and Path(places[0]).exists() else None
        place = self.of_package[top]
        if place is None or not (installed or top == TRAINER or not set(INSTALLED) & set(place.parts)):
            return None
        return place.parent

    def find(self, module: str, installed: bool = False) -> Path | None:
        """Return the file of a module; None if it has none, or is an installed package's."""
        top = module.split(".")[0]
        if top in OBSERVERS or (root := self.root_of(top, installed)) is None:
            return None
        below = root.joinpath(*module.split("."))
        files = (below.with_suffix(".py"), below / "__init__.py")
        return next((file for file in files if file.is_file()), None)


def source_files(script: Path | None, config: Mapping[str, Any]) -> list[Source]:
    """Return the files to scan: the script first, then in the order in which they are imported."""
    locator = Locator(script)
    found: dict[Path, Source] = {}
    # The trainer's loop imports what every run executes.
    waiting: list[tuple[Path | None, bool]] = [(script, False)]
    waiting += [(file, True) for file in named_files(strings_of(config), locator)]
    waiting.append((locator.find(f"{TRAINER}.trainer.rl"), False))
    while waiting:
        path, is_data = waiting.pop(0)
        if path is None or (path := path.resolve()) in found:
            continue
        source = read_source(path, is_data)
        if source is None:
            continue
        found[path] = source
        waiting += [(file, False) for name in imported_modules(source) if (file := locator.find(name))]
        if source.group != TRAINER:
            named = ((None, value) for value in constants_of(source))
            waiting += [(file, True) for file in named_files(named, locator, path.parent)]
    return list(found.values())


def read_source(path: Path, is_data: bool = False) -> Source | None:
    """Read a file; None if it is not Python of this version."""
    is_trainer = TRAINER in path.parts
    shown = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
    group = TRAINER if is_trainer else shown if is_data else "script"
    try:
        source = Source(path, shown, group, is_data, path.read_text(encoding="utf-8"))
        source.tree  # noqa: B018
    except (SyntaxError, UnicodeDecodeError):
        return None
    return source


def strings_of(options: Any, name: str = "") -> Iterator[tuple[str | None, str]]:
    if isinstance(options, Mapping):
        for key, value in options.items():
            yield from strings_of(value, str(key))
    elif isinstance(options, str):
        yield name, options


def constants_of(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            yield node.value


def named_files(
    values: Iterable[tuple[str | None, str]], locator: Locator, folder: Path | None = None
) -> Iterator[Path]:
    """Yield the files of functions named as `rewards.py:score` or `package.module.score`."""
    for option, value in values:
        if match := IN_FILE.match(value):
            places = [Path(match["file"]), *([folder / match["file"]] if folder else [])]
            yield from (place for place in places[-1:] + places[:-1] if place.is_file())
        elif DOTTED.match(value) and (option is None or option.endswith(OF_FUNCTIONS)):
            file = locator.find(value.rpartition(".")[0], installed=option is not None)
            if file is not None and TRAINER not in file.parts:
                yield file


def imported_modules(source: Source) -> Iterator[str]:
    package = package_of(source.path)
    for node in source.nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module_of(node, package)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            words = name.split(".")
            yield from (".".join(words[:count]) for count in range(1, len(words) + 1))


def package_of(path: Path) -> list[str]:
    names: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return names
