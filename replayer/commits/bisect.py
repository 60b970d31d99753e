"""The commits of a repository, which is only read."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replayer.errors import NothingToBisect, SameNumbers

FIELDS = "%H%x00%an%x00%as%x00%s"


@dataclass(frozen=True)
class Commit:
    """A commit, by its full hash."""

    hash: str
    author: str = ""
    date: str = ""
    subject: str = ""


def commits_between(repository: Path, good: str, bad: str) -> list[Commit]:
    """List the commits after `good` up to `bad`, oldest first, along first parents.

    Raises NothingToBisect.
    """
    text = git(repository, "log", "--reverse", "--first-parent", f"--format={FIELDS}", f"{good}..{bad}", "--")
    commits = [Commit(*line.split("\0")) for line in text.splitlines()]
    if not commits:
        raise NothingToBisect(
            f"there is no commit between {good} and {bad}: the first must be an ancestor of the second"
        )
    return commits


def has_commit(repository: Path, commit: str) -> bool:
    command = ["git", "-C", str(repository), "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, capture_output=True).returncode == 0


def git(repository: Path, *arguments: str) -> str:
    """Return the output of a git command. Raises NothingToBisect with its error message."""
    done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise NothingToBisect(f"git {arguments[0]} in {repository}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


# of a replay: per step, every value that differs from the record, by name
Numbers = dict[int, dict[str, Any]]


def first_difference(one: Numbers, other: Numbers) -> int | None:
    """Return the first step in which two replays differ, None if there is none."""
    return next((step for step in sorted({**one, **other}) if one.get(step) != other.get(step)), None)


@dataclass(frozen=True)
class Change:
    """A value that the commit changed; None stands for the recorded value."""

    where: str
    good: Any
    bad: Any


@dataclass(frozen=True)
class BisectReport:
    """The first commit with other numbers than `good`, and how it was found.

    Attributes:
        culprits: one commit; several if those between them could not be replayed.
        step: the first step whose numbers changed. changes: some of its values.
        files: the culprit's files with the lines that it added and removed, as printed by git.
        num_replays, num_commits: how many commits were replayed, of how many.
    """

    record: str
    culprits: tuple[Commit, ...]
    step: int
    changes: tuple[Change, ...]
    files: str
    num_replays: int
    num_commits: int
    not_replayable: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


# (commit, last step) -> numbers, or None if that commit cannot replay the record
Replay = Callable[[str, int], Numbers | None]


def bisect(commits: Sequence[str], is_good: Callable[[str], bool | None]) -> tuple[list[str], list[str]]:
    """Find the first bad commit of `commits`; the last is bad, the one before the first good.

    Args:
        is_good: None for a commit that cannot be tested; its nearest neighbours are tested instead.

    Returns:
        The first bad commit, after those directly before it that could not be tested; and all that
            could not be tested.
    """
    low, high = -1, len(commits) - 1  # good, bad
    untestable: set[int] = set()
    while candidates := [i for i in range(low + 1, high) if i not in untestable]:
        middle = min(candidates, key=lambda i: abs(2 * i - low - high))
        good = is_good(commits[middle])
        if good is None:
            untestable.add(middle)
        elif good:
            low = middle
        else:
            high = middle
    return [commits[i] for i in range(low + 1, high + 1)], [commits[i] for i in sorted(untestable)]


def find_commit(
    record: str, repository: Path, good: str, bad: str, last: int, replay: Replay
) -> BisectReport:
    """Find the commit from `good` to `bad` that changed the record's steps up to `last`.

    Args:
        record: folder or archive of the record.
        repository: folder of the git repository with both revisions.
        good: revision before the change, an ancestor of `bad`.
        bad: revision after it.
        last: the last step to replay.
        replay: replays the record with the code of a commit up to a step; None if it cannot.

    Raises:
        NothingToBisect: no commit lies between the revisions, one of them cannot replay the record,
            or both give the same numbers (SameNumbers).
    """
    commits = [commit.hash for commit in commits_between(repository, good, bad)]
    first_hash = git(repository, "rev-parse", f"{good}^{{commit}}").strip()
    ends = [replay(commit, last) for commit in (first_hash, commits[-1])]
    if ends[0] is None or ends[1] is None:
        broken = good if ends[0] is None else bad
        raise NothingToBisect(f"the code at {broken} cannot replay {record}: see its output above")
    step = first_difference(ends[0], ends[1])
    if step is None:
        raise SameNumbers(
            f"{good} and {bad} produce the same numbers up to step {last}: choose other revisions, or a later --to-step"
        )
    wanted = {number: values for number, values in ends[0].items() if number <= step}
    num_replays = 2

    def is_good(commit: str) -> bool | None:
        nonlocal num_replays
        num_replays += 1
        numbers = replay(commit, step)
        return None if numbers is None else numbers == wanted

    culprits, untestable = bisect(commits, is_good)
    return BisectReport(
        record,
        tuple(commit for commit in commits_between(repository, good, bad) if commit.hash in culprits),
        step,
        changes(ends[0][step], ends[1][step]),
        git(repository, "show", "--stat", "--format=", culprits[-1]).strip("\n"),
        num_replays,
        len(commits),
        tuple(untestable),
    )


def changes(good: Mapping[str, Any], bad: Mapping[str, Any]) -> tuple[Change, ...]:
    """List the values that differ; None stands for the recorded one."""
    names = [*good, *(name for name in bad if name not in good)]
    pairs = [(name, dict(good).get(name), dict(bad).get(name)) for name in names]
    return tuple(Change(name, a, b) for name, a, b in pairs if a != b)


def parse_numbers(report: dict[str, Any]) -> Numbers:
    """Parse the JSON of `areal-debug replay`. Statistics that the record lacks are left out."""
    return {
        step["step"]: {
            f"{d['kind']} {d['where']} (rank {d['rank']})": d["replayed"]
            for d in step["differences"]
            if d["recorded"] is not None
        }
        for step in report["steps"]
    }
