"""Code that differs between two runs: the trainer's commit, and what is in no repository of ours.

A record made before these facts were recorded lacks them, and then nothing is said to differ:
`unknown_code` lists them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from recorder.environment import VARIABLES
from recorder.format import RecordHeader
from replayer.own_code import FIRST_STAGE, USED, compare_own_code, differing, members

Kind = Literal["commit", "own code", "script", "library", "variable"]
NAMED = {
    "dirty_files": "which files had uncommitted changes",
    "script": "the user's script",
    "local_files": "the files that the script imports",
    "changed_libraries": "whether installed libraries were changed",
}


@dataclass(frozen=True)
class CodeDifference:
    """Code of two runs that differs.

    Attributes:
        what: a phrase that names it, with both values where they are short.
        file: the file, from its repository, its library's folder or the script's; None if it is not
            a file, or not known.
        line: of the first function that differs, where it is known.
        used_by: the run that used the file, where the other did not.
        acts_from: the first stage on which own code of the user acts.
    """

    kind: Kind
    what: str
    file: str | None = None
    line: int | None = None
    used_by: Literal["A", "B", "both"] = "both"
    acts_from: str = "batch"


def code_differences(
    left: RecordHeader, right: RecordHeader, is_replay: bool = False
) -> tuple[CodeDifference, ...]:
    """List what differs in the code of two runs, as far as both know it.

    Args:
        is_replay: `right` is a replay of `left`.
    """
    here, there = left.environment, right.environment
    codes = code_of(left), code_of(right)
    own: dict[tuple[Any, Any], CodeDifference] = {}  # of the user's own loss, advantage, reward and the like
    compared = compare_own_code(left, right, is_replay)
    for one in compared:
        if one.changed and (one.file, one.changed[0]) not in own:
            first, acts = one.changed[0], FIRST_STAGE.get(one.role, "batch")
            file = first.removesuffix(USED) if first.endswith(USED) else one.file
            own[one.file, first] = CodeDifference(
                "own code", f"{one.whose} ({first})", file, one.line, acts_from=acts
            )
    used = [name.removesuffix(USED) for one in compared for name in one.changed if name.endswith(USED)]
    named = {*used, *(item.file for item in own.values())}
    return (
        *own.values(),
        *commit_differences(*codes),
        *(item for item in script_differences(*codes) if Path(item.file or "").name not in named),
        *value_differences("library", "", *(members(side, "libraries") for side in (here, there))),
        *library_differences(*(members(code, "changed_libraries") for code in codes)),
        *value_differences("variable", " is", *(members(side, "variables") for side in (here, there))),
    )


def unknown_code(left: RecordHeader, right: RecordHeader) -> tuple[str, ...]:
    """List which facts on the code one of the records lacks, a phrase each."""
    found = []
    for name, header in (("A", left), ("B", right)):
        code = code_of(header)
        if code.get("commit") is None:
            found.append(f"the commit of {name}")
        found += [f"{phrase} of {name}" for member, phrase in NAMED.items() if member not in code]
    return tuple(found)


def code_of(header: RecordHeader) -> Mapping[str, Any]:
    """Return the identity of a run's code."""
    return members(header.environment, "code")


def commit_differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[CodeDifference]:
    commit, other = left.get("commit"), right.get("commit")
    if commit is None or other is None:
        return
    if commit != other:
        yield CodeDifference("commit", f"commit {commit[:10]} in A, {other[:10]} in B")
    files = members(left, "dirty_files"), members(right, "dirty_files")
    if "dirty_files" in left and "dirty_files" in right:
        for name in differing(*files):
            sides = [side for side, dirty in zip("AB", files, strict=True) if name in dirty]
            whose = f"{sides[0]} alone has" if len(sides) == 1 else "A and B have different"
            yield CodeDifference("commit", f"{whose} uncommitted changes of {name}", name)
    elif left.get("dirty_sha256") != right.get("dirty_sha256"):
        yield CodeDifference("commit", "A and B have different uncommitted changes, of unknown files")


def script_differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[CodeDifference]:
    """Yield the user's script, whatever its folder, and the files that it imports or names."""
    scripts = left.get("script"), right.get("script")
    if scripts[0] and scripts[1] and scripts[0]["sha256"] != scripts[1]["sha256"]:
        yield CodeDifference("script", f"the script {scripts[1]['path']}", scripts[1]["path"])
    if scripts[0] and scripts[1]:  # a replay has no script, and imports none of its files
        files = members(left, "local_files"), members(right, "local_files")
        for name in differing(*files):
            used_by: Literal["A", "B", "both"] = "both"
            if name not in files[0] or name not in files[1]:
                used_by = "A" if name in files[0] else "B"
            yield CodeDifference("script", f"{name}, which the script uses", name, used_by=used_by)


def value_differences(
    kind: Kind, verb: str, left: Mapping[str, Any], right: Mapping[str, Any]
) -> Iterator[CodeDifference]:
    """Yield versions or variables that both sides know, as is known of some variables without a value."""
    known = left.keys() & right.keys() | (set(VARIABLES) if kind == "variable" else set())
    for name in sorted(known):
        one, other = ("not set" if side.get(name) is None else side[name] for side in (left, right))
        if one != other:
            yield CodeDifference(kind, f"{name}{verb} {one} in A, {other} in B")


def library_differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[CodeDifference]:
    """Yield files of libraries that are not those of their wheel, and not equal on both sides."""
    for library in sorted(left.keys() & right.keys()):
        sides = left[library], right[library]
        if None not in sides:
            for name in differing(*sides):
                where = " and ".join(side for side, files in zip("AB", sides, strict=True) if name in files)
                yield CodeDifference(
                    "library", f"{name} in {where} is not the file of {library}'s wheel", name
                )
