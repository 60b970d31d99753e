"""Which definitions of a commit are used by a computation: references between them, read with ast.

    entry "areal_core/trainer/update.py:update" ─> names in its body ─> definitions here, or in files that this one imports ─> ...

A definition is a function, a class, a method ("Class.method") or a constant of a module. A class is
followed into the methods that Python and torch call; others are found by the name of an attribute,
in the classes of this file and of those that it imports. That finds too much rather than too
little, so the distance from the entry counts: the number of references on the shortest way.
"""

import ast
import copy
import re
import subprocess
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from replayer.commits.bisect import git

Definition = tuple[str, str]  # path of the file, name; "" is the rest of the module
UNSEEN = re.compile(r"forward|backward|step|__.*__")  # methods that torch or Python calls


@dataclass(frozen=True)
class SourceFile:
    """The definitions of a file, and the names that it imports anywhere.

    `imported`: name -> (module, name in it, or None for the module itself).
    """

    path: str
    definitions: dict[str, list[ast.stmt]]
    imported: dict[str, tuple[str, str | None]]

    @cached_property
    def content(self) -> dict[str, str]:
        """What each definition computes: equal text means equal code, whatever its comments."""
        return {
            name: "\n".join(ast.dump(without_docstrings(node)) for node in nodes)
            for name, nodes in self.definitions.items()
        }


def parse_source(path: str, text: str) -> SourceFile:
    """Parse a file; one that is not valid Python has no definitions."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return SourceFile(path, {}, {})
    definitions: dict[str, list[ast.stmt]] = {"": []}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            definitions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            for method in methods:
                definitions.setdefault(f"{node.name}.{method.name}", []).append(method)
            rest = [item for item in node.body if item not in methods]
            definitions[node.name] = [with_body(node, rest)]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and (names := names_assigned(node)):
            for name in names:
                definitions.setdefault(name, []).append(node)
        elif not isinstance(node, ast.Import | ast.ImportFrom) and not is_docstring(node):
            definitions[""].append(node)
    return SourceFile(path, definitions, dict(imports_of(tree, path)))


def with_body(node: ast.stmt, body: list[ast.stmt]) -> ast.stmt:
    changed: Any = copy.copy(node)
    changed.body = body or [ast.Pass()]
    return changed


def names_assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def imports_of(tree: ast.Module, path: str) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """Yield the imports of a module, in functions too, relative ones with their full name."""
    package = PurePosixPath(path).parent
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name, (alias.name, None)
                if not alias.asname:  # `import a.b` binds a, and loads a.b
                    yield (first := alias.name.split(".")[0]), (first, None)
        elif isinstance(node, ast.ImportFrom):
            module = module_of(node, package.parts)
            for alias in node.names:
                yield alias.asname or alias.name, (module, alias.name)


def module_of(node: ast.ImportFrom, package: Sequence[str]) -> str:
    """Return the full name of the module that a file in a package imports from."""
    above = package[: len(package) - node.level + 1] if node.level else ()
    return ".".join([*above, *([node.module] if node.module else [])])


def without_docstrings(node: ast.stmt) -> ast.stmt:
    """Return a statement without its docstring; those of nested functions stay."""
    body = getattr(node, "body", None)
    if not isinstance(body, list) or not body or not is_docstring(body[0]):
        return node
    return with_body(node, body[1:])


def is_docstring(node: ast.stmt) -> bool:
    """Return whether a statement is a text alone."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@dataclass
class Sources:
    """The Python files of a commit, parsed when they are needed."""

    reader: "subprocess.Popen[bytes]"
    commit: str
    paths: frozenset[str]
    parsed: dict[str, SourceFile] = field(default_factory=dict)

    def file(self, path: str) -> SourceFile:
        """Return a file; one that the commit lacks has no definitions."""
        if path not in self.parsed:
            text = self.read(path) if path in self.paths else ""
            self.parsed[path] = parse_source(path, text)
        return self.parsed[path]

    def read(self, path: str) -> str:
        """Return the text of a file of the commit."""
        assert self.reader.stdin is not None
        assert self.reader.stdout is not None
        self.reader.stdin.write(f"{self.commit}:{path}\n".encode())
        self.reader.stdin.flush()
        size = int(self.reader.stdout.readline().split()[2])
        return self.reader.stdout.read(size + 1)[:-1].decode(errors="replace")

    def path_of(self, module: str) -> str | None:
        """Return the file of a module, None for one of another repository."""
        stem = module.replace(".", "/")
        names = [f"{stem}.py", f"{stem}/__init__.py"]
        return next((name for name in names if name in self.paths), None)

    def resolve(self, module: str, name: str | None) -> list[Definition]:
        """Return the definitions that an imported name stands for, through re-exports."""
        path = self.path_of(module)
        submodule = self.path_of(f"{module}.{name}") if name else None
        if submodule is not None:
            return [(submodule, "")]
        if path is None:
            return []
        source = self.file(path)
        if name is None or name in source.definitions:
            return [(path, name or "")]
        if name in source.imported and source.imported[name] != (module, name):
            return self.resolve(*source.imported[name])
        return [(path, "")]

    def references(self, definition: Definition) -> set[Definition]:
        path, name = definition
        source = self.file(path)
        nodes = [inner for node in source.definitions.get(name, ()) for inner in ast.walk(node)]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        found = {(path, other) for other in names if other in source.definitions}
        for other in names & source.imported.keys():
            for target in self.resolve(*source.imported[other]):
                found.add(target)
                found |= {
                    (target[0], a) for a in attributes if not target[1] and a in self.definitions(target)
                }
        imported = {path for target in source.imported.values() for path, _ in self.resolve(*target)}
        for file in {*imported, path}:
            defined = self.file(file).definitions
            found |= {(file, method) for method in defined if method.partition(".")[2] in attributes}
        methods = [other for other in source.definitions if other.startswith(f"{name}.") and name]
        found |= {(path, method) for method in methods if UNSEEN.fullmatch(method.partition(".")[2])}
        return {*found, (path, "")} - {definition}

    def definitions(self, definition: Definition) -> dict[str, list[ast.stmt]]:
        return self.file(definition[0]).definitions

    def distances(self, entries: Iterable[str], stops: Iterable[str] = ()) -> dict[Definition, int]:
        """Return the number of references from the entries to each definition that they reach.

        Args:
            entries: "path" (every definition of the file) or "path:definition".
            stops: definitions whose references are not followed.
        """
        starts = {definition for entry in entries for definition in self.expand(entry)}
        ends = {definition for stop in stops for definition in self.expand(stop)}
        found = dict.fromkeys(starts, 0)
        waiting = deque(starts - ends)
        while waiting:
            current = waiting.popleft()
            for other in self.references(current):
                if other not in found:
                    found[other] = found[current] + 1
                    if other not in ends:
                        waiting.append(other)
        return found

    def expand(self, entry: str) -> list[Definition]:
        """Return the definitions of an entry; none if the commit lacks them."""
        path, _, name = entry.partition(":")
        defined = self.file(path).definitions
        return (
            [(path, name)] if name in defined and name else [] if name else [(path, one) for one in defined]
        )


@contextmanager
def sources(repository: Path, commit: str) -> Iterator[Sources]:
    """Open the Python files of a commit. Raises NothingToBisect for one that does not exist."""
    listed = git(repository, "ls-tree", "-r", "-z", "--name-only", "--full-tree", commit).split("\0")
    paths = frozenset(path for path in listed if path.endswith(".py"))
    command = ["git", "-C", str(repository), "cat-file", "--batch"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        yield Sources(reader, commit, paths)
        assert reader.stdin is not None
        reader.stdin.close()


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def named_by(entries: Iterable[str]) -> Iterator[str]:
    """Yield entries of the table, with those of a group in the place of its name."""
    for entry in entries:
        yield from named_by(TABLE["groups"][entry[1:]]) if entry.startswith("@") else (entry,)


# stage -> where its computation starts
ENTRIES: dict[str, tuple[str, ...]] = {
    stage: tuple(named_by(entries)) for stage, entries in TABLE["entries"].items()
}
OF_EVERY_STAGE: list[str] = TABLE["of_every_stage"]
HUNK = re.compile(r"^@@ -\d+(?:,\d+)? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


@dataclass(frozen=True)
class ChangedFile:
    """A file that changed between two commits and acts on a stage.

    Attributes:
        first_line: the first changed line of code, in the later commit, of the definition that is
            nearest to the stage.
        added, removed: lines of the file, as counted by git.
        distance: references from the stage to that definition.
    """

    path: str
    first_line: int
    added: int
    removed: int
    distance: int


def files_acting(repository: Path, good: str, bad: str, stage: str) -> tuple[ChangedFile, ...]:
    """List the files changed from `good` to `bad` that act on a stage, the nearest first.

    Args:
        stage: one of `replayer.compare.stages.STAGES`.

    Raises NothingToBisect for a revision that does not exist.
    """
    listed = git(repository, "diff", "--numstat", "--no-renames", "-z", good, bad, "--").split("\0")
    counts = [line.split("\t", 2) for line in listed if line.endswith(".py")]
    if not counts:
        return ()
    with sources(repository, good) as before, sources(repository, bad) as after:
        stops = (*OF_EVERY_STAGE, *TABLE["not_followed"].get(stage, ()))
        reached = after.distances([*ENTRIES[stage], *OF_EVERY_STAGE], stops)
        found = []
        for added, removed, path in counts:
            changed = changed_definitions(before.file(path), after.file(path))
            near = [(reached[path, name], name) for name in changed if (path, name) in reached]
            if near:
                distance, name = min(near)
                line = first_changed_line(repository, good, bad, after, (path, name))
                found.append(ChangedFile(path, line, int(added), int(removed), distance))
    return tuple(sorted(found, key=lambda file: (file.distance, file.path)))


def changed_definitions(before: SourceFile, after: SourceFile) -> set[str]:
    """Return the names of definitions that compute something else in the later file.

    Of a definition that was removed it is the rest of the module, "".
    """
    old, new = before.content, after.content
    changed = {name for name, content in new.items() if name not in old or old[name] != content}
    return changed | ({""} if old.keys() - new.keys() and new else set())


def first_changed_line(repository: Path, good: str, bad: str, after: Sources, definition: Definition) -> int:
    path, name = definition
    nodes = after.file(path).definitions[name]
    # decorators precede the line of a definition
    spans = [
        (min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]), node.end_lineno or 0)
        for node in nodes
    ]
    text = git(repository, "diff", "-U0", "--no-renames", good, bad, "--", path)
    lines = after.read(path).splitlines()
    texts = [
        inner
        for node in nodes
        for inner in ast.walk(node)
        if isinstance(inner, ast.Expr) and is_docstring(inner)
    ]
    prose = {n for text in texts for n in range(text.lineno, (text.end_lineno or 0) + 1)}
    changed: list[int] = []
    for match in HUNK.finditer(text):
        begin, count = int(match[1]), int(match[2] or 1)
        changed += range(begin, begin + count) if count else [begin]  # removed lines were after `begin`
    inside = [n for n in changed if any(first <= n <= last for first, last in spans)]
    code = [n for n in inside if n not in prose and lines[n - 1].strip() and lines[n - 1].strip()[0] != "#"]
    return next(iter([*code, *inside, *(first for first, _ in spans), 1]))
