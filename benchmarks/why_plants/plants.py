"""Planted bugs and equal pairs as data: the YAML files of this folder, parsed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
# file -> kind of the cause of its plants, unless they name another
KINDS = {"code": "code", "settings": "config", "outside": "code"}


@dataclass(frozen=True)
class Edit:
    """Replacement of the one occurrence of a text in a file."""

    file: str
    old: str
    new: str

    def apply(self, folder: Path) -> None:
        """Change the file below `folder`. Raises ValueError unless it holds the text."""
        file = folder / self.file
        text = file.read_text()
        if self.old not in text:
            raise ValueError(f"{file} has no {self.old!r}: the code has changed, adapt the plant")
        before, after = text.split(self.old, 1)
        file.unlink()  # it may be a link
        file.write_text(before + self.new + after)

    def lines(self, folder: Path) -> range:
        """Return the numbers of the lines that the new text occupies."""
        first = (folder / self.file).read_text().split(self.new, 1)[0].count("\n") + 1
        return range(first, first + self.new.count("\n") + 1)


@dataclass(frozen=True)
class Library:
    """A copy of a package, with an edit, that precedes the installed one on PYTHONPATH."""

    package: str
    edit: Edit
    version: str | None


@dataclass(frozen=True)
class Truth:
    """Right answers: any of `stages`, `patterns` and `causes`; `named` are names of the culprit."""

    stages: tuple[str, ...]
    patterns: tuple[str | None, ...]
    causes: tuple[str, ...]
    named: tuple[str, ...]


@dataclass(frozen=True)
class Plant:
    """A difference between the runs A and B; `truth` is None if their numbers are equal.

    `edits` are a commit among innocent ones; None: B runs the commit of A. With `both`, A has the
    edits of the `script`, too.
    """

    name: str
    kind: str
    truth: Truth | None
    base: str = "plain"
    edits: tuple[Edit, ...] | None = None
    script: tuple[Edit, ...] = ()
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    library: Library | None = None
    both: bool = False
    archive: bool = False
    resumed: bool = False


def read(name: str) -> dict[str, Any]:
    """Read a YAML file of this folder."""
    loaded: dict[str, Any] = yaml.safe_load((HERE / f"{name}.yaml").read_text())
    return loaded


def read_plants() -> list[Plant]:
    """Return all planted bugs, then all equal pairs."""
    bugs = [parse(name, kind, body) for file, kind in KINDS.items() for name, body in read(file).items()]
    return bugs + [parse(name, "equal", body) for name, body in read("pairs").items()]


def parse(name: str, kind: str, body: dict[str, Any]) -> Plant:
    """Parse a plant. Raises TypeError or KeyError for a field that does not exist."""
    rest = dict(body)
    kind = rest.pop("kind", kind)
    truth = None
    if kind != "equal":
        fields = {key: tuple(rest.pop(key)) for key in ("stages", "patterns", "named")}
        truth = Truth(causes=tuple(rest.pop("causes", [kind])), **fields)
    if "library" in rest:
        given = dict(rest["library"])
        package, version = given.pop("package"), given.pop("version", None)
        rest["library"] = Library(package, Edit(**given), version)
    if "edits" in rest:
        rest["edits"] = tuple(Edit(**edit) for edit in rest["edits"])
    rest["script"] = tuple(Edit(**edit) for edit in rest.get("script", ()))
    rest["options"] = tuple(rest.get("options", ()))
    return Plant(name, kind, truth, **rest)


def innocent_commits(when: str) -> list[tuple[str, list[Edit]]]:
    """Return subject and edits of the commits "before" or "after" a planted one."""
    return [(commit["subject"], [Edit(**e) for e in commit["edits"]]) for commit in read("innocent")[when]]
