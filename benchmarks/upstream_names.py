"""Check the names of AReaL in docs/coming_from_areal.md against AReaL's own code.

    python -m benchmarks.upstream_names CLONE

CLONE is a clone of AReaL, also a bare one; nothing in it is run. Each name in a table's columns
that are headed "AReaL", and each one that is translated, is searched for in the commits of
`COMMITS`; where it exists is written to tests/core/upstream_names.txt, which a test compares with
the page. A name that exists nowhere ends the script with its name.
"""

import ast
import re
import subprocess
import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator
from pathlib import Path

from areal_core.config.import_paths import OURS
from benchmarks.harness import read_options

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coming_from_areal.md"
LIST = ROOT / "tests" / "core" / "upstream_names.txt"
# What a column's header names -> commits that are searched.
COMMITS = {
    "0.1 to 0.3": ("v0.3.0",),
    "0.3 to 0.5": ("v0.3.0-lite", "v0.3.1", "v0.3.4", "v0.4.0", "v0.5.1"),
    "1.0 to 2.0": ("v1.0.2", "v1.0.4", "cbff54d64"),
}
PACKAGES = ("areal", "realhf", "examples")
ALL = [commit for commits in COMMITS.values() for commit in commits]


def upstream_cells(page: str) -> Iterator[tuple[str, str]]:
    """Yield header and cell of each column that is headed "AReaL ..."."""
    for header, cell in cells(page):
        if header.startswith("AReaL"):
            yield header, cell


def cells(page: str) -> Iterator[tuple[str, str]]:
    """Yield the header and the text of each cell of the page's tables."""
    headers: list[str] = []
    for line in page.splitlines():
        if not line.startswith("|"):
            headers = []
            continue
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if not headers:
            headers = row
        elif set(line) - set("|- "):
            yield from zip(headers, row, strict=True)


def names_in(cell: str) -> Iterator[str]:
    """Yield the names in a cell's code: without arguments, values and the words of a command."""
    for code in re.findall(r"`([^`]+)`", cell):
        words = code.split()
        for word in words:
            name = re.split(r"[(=:]", word)[0]
            is_name = re.fullmatch(r"[A-Za-z_]\w*([./-]\w+)*", name) is not None
            if is_name and (len(words) == 1 or "/" in name or "." in name or "=" in word):
                yield name


class Commit:
    """The names of one commit."""

    def __init__(self, clone: Path, commit: str) -> None:
        self.clone, self.commit = clone, commit
        self.files = self.git("ls-tree", "-r", "--name-only", commit).splitlines()
        self.names: set[str] = set()
        self.fields: dict[str, dict[str, str]] = {}  # of classes: field -> text of its type
        self.bases: dict[str, list[str]] = {}
        for file in self.files:
            if file.startswith(tuple(f"{package}/" for package in PACKAGES)) and file.endswith(".py"):
                self.read(file)

    def git(self, *arguments: str) -> str:
        """Return the output of a git command; "" if it fails."""
        command = ["git", "-C", str(self.clone), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def read(self, file: str) -> None:
        """Add the public names of a module."""
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.names.add(module)
        for node in ast.parse(self.git("show", f"{self.commit}:{file}")).body:
            if isinstance(node, ast.ClassDef):
                self.read_class(module, node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.names.add(f"{module}.{node.name}")
            elif isinstance(node, ast.ImportFrom) and file.endswith("__init__.py"):
                self.names |= {f"{module}.{alias.asname or alias.name}" for alias in node.names}
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                self.names |= {f"{module}.{item}" for item in ast.literal_eval(node.value)}

    def read_class(self, module: str, node: ast.ClassDef) -> None:
        """Add a class, its methods and its fields."""
        self.names.add(f"{module}.{node.name}")
        self.bases[node.name] = [ast.unparse(base) for base in node.bases]
        fields = self.fields.setdefault(node.name, {})
        for item in node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                self.names.add(f"{module}.{node.name}.{item.name}")
            elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                fields[item.target.id] = ast.unparse(item.annotation)

    def fields_of(self, cls: str) -> ChainMap[str, str]:
        """Return the fields of a class with those of its bases."""
        inherited = (self.fields_of(base) for base in self.bases.get(cls, ()))
        return ChainMap(self.fields.get(cls, {}), *inherited)

    def has(self, name: str) -> bool:
        """Return whether the commit has a name of any kind."""
        if name in self.files or any(file.startswith(f"{name}/") for file in self.files):
            return True
        if name.startswith(("areal.", "realhf.", "examples.")):
            return name in self.names
        if "/" in name:  # a metric: each of its scopes, and its own name
            return all(self.mentions(word) for word in name.split("/"))
        if name[0].isupper() and not name.isupper():  # Class, or Class.method
            return any(known.endswith(f".{name}") for known in self.names)
        return self.has_option(name) or (("." not in name or name.endswith(".yaml")) and self.mentions(name))

    def mentions(self, word: str) -> bool:
        """Return whether the code contains a word."""
        return bool(self.git("grep", "-lwF", "-m1", word, self.commit, "--", *PACKAGES))

    def has_option(self, option: str) -> bool:
        """Return whether a config class has an option; its last name may be a section."""
        classes: Iterable[str] = [cls for cls in self.fields if cls.endswith("Config")]
        for part in option.split("."):
            types = " ".join(self.fields_of(cls)[part] for cls in classes if part in self.fields_of(cls))
            if not types:
                return False
            classes = [word for word in re.findall(r"\w+", types) if word in self.fields]
        return True


def wanted_names() -> dict[str, list[str]]:
    """Return each name of upstream with the commits of which one must have it."""
    wanted: dict[str, list[str]] = dict.fromkeys(OURS, ALL)
    for header, cell in upstream_cells(PAGE.read_text()):
        commits = COMMITS.get(header.removeprefix("AReaL").strip(), ALL)
        wanted |= {name: list(commits) for name in names_in(cell)}
    return wanted


def main() -> None:
    """Write the list, or name what exists nowhere."""
    clone = read_options(__doc__, {"clone": Path}).clone
    commits = [Commit(clone, commit) for commit in ALL]
    lines, missing = [], []
    for name, allowed in sorted(wanted_names().items()):
        found = [commit.commit for commit in commits if commit.has(name)]
        if not set(found) & set(allowed):
            missing.append(f"{name}: not in {', '.join(allowed)}")
        lines.append(" ".join([name, *found]))
    if missing:
        sys.exit("\n".join(missing))
    LIST.write_text("".join(f"{line}\n" for line in lines))
    print(f"{len(lines)} names in {LIST}")


if __name__ == "__main__":
    main()
