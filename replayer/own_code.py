"""The user's own code in a replay: where it may come from, and what of it has changed.

A record names the functions and classes that computed its steps. It never decides that they run:
they are imported only from files or folders that the user gives: with `--code PATH`, as the mark's
`code`, or in the variable AREAL_DEBUG_CODE. Imports no torch.
"""

import os
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec

from areal_core.config.source_digests import OF_MODULE, digests
from areal_core.config.train_engine import OWN_CODE
from areal_core.environment import ALLOWED_CODE
from recorder import Record
from recorder.format import RecordHeader
from replayer.errors import ReplayError

OURS = ("areal_core.", "areal_debug.")
ROLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NAMES: dict[str, str] = {role: row["name"] for role, row in ROLES.items()}
FIRST_STAGE: dict[str, str] = {
    role: row["first_stage"] for role, row in ROLES.items() if "first_stage" in row
}
USED = ", which it uses"  # of what has changed: another file
OUR_LAMBDAS = "areal_core.algorithm.gae_lambda."  # functions that a record may name without --code


@dataclass(frozen=True)
class Function:
    """A function of a file: its first line, digest, and the functions of the file that it names."""

    line: int
    sha256: str
    names: list[str]


@dataclass(frozen=True)
class OwnCode:
    """An object that computed a run in place of ours, as its record names it.

    `arguments` are those of an objective that the script has set: {} unless it did, None if how it
    was built is not known.
    """

    role: str
    import_path: str
    file: str | None = None
    sha256: str | None = None
    functions: dict[str, Function] = field(default_factory=dict)
    uses: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] | None = field(default_factory=dict)

    @property
    def parts(self) -> tuple[str, str]:
        """The module or file of the import path, and the name in it."""
        place, _, name = self.import_path.rpartition(":" if ":" in self.import_path else ".")
        return place, name

    @property
    def file_name(self) -> str:
        """The name of its file, or the module if that is not known."""
        return Path(self.file).name if self.file else self.parts[0]

    def __str__(self) -> str:
        return f"{NAMES[self.role].format(self.parts[1])} of {self.file_name}"


@dataclass(frozen=True)
class OwnCodeState:
    """Own code in a replay, or in a second run: `changed` has what differs, and `line` its first.

    `changed` are functions by their names, and other files; empty if the code is the recorded one.
    """

    role: str
    name: str
    file: str
    changed: tuple[str, ...] = ()
    line: int | None = None

    @property
    def whose(self) -> str:
        """What it is called, and its file."""
        return f"{NAMES[self.role].format(self.name)} of {self.file}"

    def __str__(self) -> str:
        changed = [name.removesuffix(USED) for name in self.changed[:3]]
        return f"{self.whose}, changed: {', '.join(changed)}" if changed else f"{self.whose}, unchanged"


def own_code_of(header: RecordHeader, roles: Collection[str] = OWN_CODE) -> dict[str, OwnCode]:
    """Return what computed a run in place of ours, by its role.

    Raises ReplayError: an identity in the record is not one.
    """
    named, actor = members(header.environment, "code"), members(header.config, "actor")
    # a path that the options have and no identity: of a record that something else has written
    paths = {role: actor[role] for role in OWN_CODE if actor.get(role)}
    found = {}
    for role in roles:
        entry = named.get(role) or ({"import_path": paths[role]} if role in paths else None)
        if entry is None:
            continue
        try:
            own = msgspec.convert({"role": role} | entry, OwnCode)
        except (msgspec.ValidationError, TypeError) as error:
            raise ReplayError(f"the record's identity of its {NAMES[role]} is damaged: {error}") from None
        path = own.import_path.replace(":", ".")
        if not path.startswith(OUR_LAMBDAS if role in OWN_CODE else OURS):
            found[role] = own
    return found


def put_own_code(tree: dict[str, Any], record: Record, settings: Collection[str]) -> None:
    """Set the options of own code to what is imported of a record's, from where the user allows.

    Args:
        tree: options of the record, changed in place.
        settings: overrides of the user; own code that they name is theirs.

    Raises:
        ReplayError: the user allows no place, or it is not there.
    """
    actor, recorded = tree.get("actor"), own_code_of(record.header)
    if not isinstance(actor, dict):
        return
    set_here = {text.partition("=")[0].removeprefix("actor.") for text in settings}
    for role in OWN_CODE:
        if actor.get(role) is not None and not str(actor[role]).startswith(OUR_LAMBDAS):
            actor[role] = None
    for role, path in located(record, {role: own for role, own in recorded.items() if role not in set_here}):
        own = recorded[role]
        actor[role] = importable(own, path)
        if own.arguments:
            actor["objective_kwargs"] = own.arguments | (actor.get("objective_kwargs") or {})


def located(record: Record, needed: Mapping[str, OwnCode]) -> Iterator[tuple[str, Path]]:
    """Yield the file of each object. Raises ReplayError as `put_own_code`."""
    places = [Path(place) for place in os.environ.get(ALLOWED_CODE, "").split(os.pathsep) if place]
    for role, own in needed.items():
        if own.arguments is None:
            raise ReplayError(
                f"{record.path} was computed by an objective that its script set, {own.parts[1]} of {own.file_name}, and how "
                "that was built is not recorded: give the script's class as actor.objective, or replay with "
                f"`areal-debug train SCRIPT --replay-rollout {record.path}`"
            )
        ordered = sorted(places, key=lambda place: place.name != own.file_name)
        path = next((path for place in ordered if (path := path_below(place, own)) is not None), None)
        if path is None:
            raise ReplayError(refusal(record, list(needed.values()), own, places))
        script = members(members(record.header.environment, "code"), "script")
        if script and own.file == script.get("path") and "__main__" not in path.read_text(errors="replace"):
            raise ReplayError(
                f"{own} is in the script of the run, which trains when it is imported: put the training of {path} "
                'below `if __name__ == "__main__":`, or move the function to a file of its own'
            )
        yield role, path


def refusal(record: Record, needed: list[OwnCode], own: OwnCode, places: list[Path]) -> str:
    names = ", ".join(map(str, needed))
    if places:
        given = ", ".join(map(str, places))
        return f"{record.path} was computed by {names}; {own.file_name} is not at {given}: give its file or folder as --code"
    state = "is not on this machine" if own.file else "has no recorded file"
    if own.file and Path(own.file).is_file():
        state = "is unchanged" if digests(Path(own.file))["sha256"] == own.sha256 else "has changed since"
    code = quote(own.file or "FILE")
    return (
        f"{record.path} was computed by {names}, and no record decides that code runs: add --code {code} "
        f'(of a pytest mark, code="{own.file_name}") to use it; {own.file_name} {state}'
    )


def path_below(place: Path, own: OwnCode) -> Path | None:
    """Return the file of an object at or below a place that the user gives, None without one."""
    if place.is_file():
        return place.resolve()
    parts = Path(own.file or f"{own.parts[0].removesuffix('.py').replace('.', '/')}.py").parts
    parts = tuple(part for part in parts if part not in ("/", ".."))
    found = (place.joinpath(*parts[first:]) for first in range(len(parts)))
    return next((path.resolve() for path in found if path.is_file()), None)


def importable(own: OwnCode, path: Path) -> str:
    """Return the import path of an object in a file; a module of a package is imported as one."""
    place, name = own.parts
    module = tuple(place.split("."))
    if len(module) < 2 or path.with_suffix("").parts[-len(module) :] != module:
        return f"{path}:{name}"
    sys.path.insert(0, str(path.parents[len(module) - 1]))
    return f"{place}:{name}"


def check_own_code(record: Record) -> None:
    """Raise ReplayError unless the user allows own code of the record, and it is there."""
    for _ in located(record, own_code_of(record.header)):
        pass


def is_allowed(record: Record) -> bool:
    """Return whether a replay of the record has the own code that it needs."""
    try:
        check_own_code(record)
    except ReplayError:
        return False
    return True


def compare_own_code(left: RecordHeader, right: RecordHeader, is_replay: bool) -> tuple[OwnCodeState, ...]:
    """Compare the own code of two runs: of what both have, or of what computes a step.

    Args:
        is_replay: `right` replays `left`: it has no workflow.
    """
    here, there = (own_code_of(header, OWN_CODE if is_replay else tuple(NAMES)) for header in (left, right))
    found = []
    for role in NAMES:
        one, other = here.get(role), there.get(role)
        if one and other:
            found.append(replace(changes_of(one, other), role=role))
        elif (known := one or other) and role in OWN_CODE:
            side = "A" if one else "B"
            found.append(OwnCodeState(role, known.parts[1], known.file_name, (f"only {side} uses it",)))
    return tuple(found)


def changes_of(one: OwnCode, other: OwnCode) -> OwnCodeState:
    state = OwnCodeState(other.role, other.parts[1], other.file_name)
    if (one.sha256, one.uses, one.parts[1]) == (other.sha256, other.uses, other.parts[1]):
        return state
    digests = [{name: found.sha256 for name, found in reached_by(own).items()} for own in (one, other)]
    names = differing(*digests)
    # the function of the role first, then as in the file
    names.sort(
        key=lambda name: (name.partition(".")[0] != other.parts[1], name == OF_MODULE, line_of(other, name))
    )
    changed = ["code outside of functions" if name == OF_MODULE else f"function {name}" for name in names]
    changed += [f"{name}{USED}" for name in differing(one.uses, other.uses)]
    if one.parts[1] != other.parts[1]:
        changed.insert(0, f"{one.parts[1]} in its place before")
    if not (one.functions and other.functions) and one.sha256 != other.sha256:
        changed.append(other.file_name)
    return replace(state, changed=tuple(changed), line=line_of(other, names[0]) if names else None)


def reached_by(own: OwnCode) -> dict[str, Function]:
    """Return the functions of its file that an object names, directly or through others."""
    waiting = [name for name in own.functions if name == OF_MODULE or own.parts[1] in name.split(".")]
    found: dict[str, Function] = {}
    while waiting:
        if (name := waiting.pop()) not in found and name in own.functions:
            found[name] = own.functions[name]
            waiting += found[name].names
    return found


def line_of(own: OwnCode, name: str) -> int:
    return own.functions[name].line if name in own.functions else 1


def members(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a member that is an object; an empty one if there is none."""
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Return the names of members that are on one side only, or differ."""
    lacking = object()
    names = left.keys() | right.keys()
    return sorted(name for name in names if left.get(name, lacking) != right.get(name, lacking))


def code_arguments(files: Collection[str | None]) -> list[str]:
    """Return the options that let another command use own code in these files as this one does."""
    given = os.environ.get(ALLOWED_CODE, "").split(os.pathsep) if files else []
    places = [os.path.relpath(place) for place in given if place] or sorted(set(filter(None, files)))
    return [word for place in places for word in ("--code", place)]


def by_name(header: RecordHeader) -> dict[str, Any]:
    """Return the options of a run with own code by name alone: its place has no effect."""
    actor, own = members(header.config, "actor"), own_code_of(header)
    if not own:
        return header.config
    arguments = next((one.arguments for one in own.values() if one.arguments), {})
    changed: dict[str, Any] = {role: one.parts[1] for role, one in own.items()}
    if arguments:
        changed["objective_kwargs"] = arguments | (actor.get("objective_kwargs") or {})
    return header.config | {"actor": {**actor, **changed}}
