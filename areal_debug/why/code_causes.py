"""The commit, file and line that made a stage compute other numbers.

both commits known ─> commits that change what the stage runs ─ none ─> not the code
                                │ after the batch                  batch
                                └─> bisect: replays in worktrees     └─> the nearest file
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from areal_debug.why.causes import WORDS, Case
from areal_debug.why.report import Cause, Confidence, Finding, listed
from replayer.commits.acting import ChangedFile, files_acting
from replayer.commits.outside import code_of
from replayer.commits.repository import Commit, commits_between, git, has_commit
from replayer.commits.warm import search_commits
from replayer.errors import SameNumbers
from replayer.request import Request
from replayer.stages import STAGES

Note = Callable[[str], None]


@dataclass(frozen=True)
class Acting:
    """A commit that changes what a stage runs, and the file of it that is nearest."""

    commit: Commit
    file: ChangedFile


@dataclass(frozen=True)
class History:
    """The commits between two records: `older` to `newer`, and those that act, oldest first.

    `is_reversed`: A has the newer one. `num_commits` is how many there are.
    """

    repository: Path
    older: str
    newer: str
    is_reversed: bool
    num_commits: int
    acting: tuple[Acting, ...]


def commits_of(case: Case) -> tuple[str | None, str | None]:
    one, other = (code_of(record.header).get("commit") for record in (case.left, case.right))
    return one, other


def read_history(
    case: Case, repository: Path, commits: tuple[str | None, str | None]
) -> History | str | None:
    """Return the commits between the records, None if they are the same, or why it is not known."""
    one, other = commits
    if one is None or other is None or one == other:
        return None
    missing = [commit[:10] for commit in (one, other) if not has_commit(repository, commit)]
    if missing:
        return f"commit {' and '.join(missing)} is not in {repository}: give the checkout with --repository"
    base = git(repository, "merge-base", one, other).strip()
    if base not in (one, other):
        return f"commits {one[:10]} and {other[:10]} are on different branches: bisect from {base[:10]}"
    older, newer = (one, other) if base == one else (other, one)
    between = commits_between(repository, older, newer)
    acting = []
    if paths := [file.path for file in acting_on(case, repository, older, newer)]:
        touched = git(repository, "rev-list", "--first-parent", f"{older}..{newer}", "--", *paths).split()
        for commit in [commit for commit in between if commit.hash in touched]:
            if files := acting_on(case, repository, f"{commit.hash}^", commit.hash):
                acting.append(Acting(commit, files[0]))
    return History(repository, older, newer, older == other, len(between), tuple(acting))


def acting_on(case: Case, repository: Path, older: str, newer: str) -> list[ChangedFile]:
    """List the changed files that act where the records differ, the nearest first.

    What an earlier stage computed is not known if that stage was not recorded.
    """
    stage = case.first.stage
    stages = [
        stage,
        *(earlier for earlier in STAGES[: STAGES.index(stage)] if earlier in case.report.not_compared),
    ]
    if case.first.name == "loss_mask":  # it is aligned where the advantages are computed
        stages.append("advantages")
    files = {
        file.path: file for one in reversed(stages) for file in files_acting(repository, older, newer, one)
    }
    return sorted(files.values(), key=lambda file: nearness(case, file))


def nearness(case: Case, file: ChangedFile) -> tuple[bool, int]:
    """Return the sort key of a file: whether its path does not name what differs, its distance."""
    words = WORDS.get(case.kind_of_batch or "", ())
    return bool(words) and not any(word in file.path for word in words), file.distance


def bisected(case: Case, history: History, model: str | None, note: Note) -> Finding | None:
    """Replay A by the commits that act, or all, and return the one that changed its numbers.

    None if all of them produce the same numbers: then the code is not the cause.

    Raises NothingToBisect if a commit cannot replay A.
    """
    good, bad = history.older, history.newer
    if history.acting:
        good, bad = f"{history.acting[0].commit.hash}^", history.acting[-1].commit.hash
    request = Request(case.left.path, case.step, case.step, model and str(Path(model).resolve()))
    try:
        report = search_commits(request, history.repository, good, bad, case.left.header.world_size, note)
    except SameNumbers:
        return None
    culprit = report.culprits[-1]
    of_culprit = [item for item in history.acting if item.commit.hash == culprit.hash]
    place = of_culprit[0].file if of_culprit else None
    found = commit_finding(case, history, culprit, place, "high" if len(report.culprits) == 1 else "medium")
    return found.with_evidence(
        "steps of A, replayed by the commits, change with this one, first in "
        f"step {report.step} ({report.num_replays} replays)"
    )


def commit_finding(
    case: Case, history: History, commit: Commit, place: ChangedFile | None, confidence: Confidence
) -> Finding:
    file, line = (None, None) if place is None else (place.path, place.first_line)
    where = "" if file is None else f" changed {file}:{line}"
    side = "A" if history.is_reversed else "B"
    what = f'commit {commit.hash[:10]} "{commit.subject}"{where}, and only {side} has it'
    evidence = f"of {history.num_commits} commits between A and B, {len(history.acting)} changed what the {case.first.stage} runs"
    path = "" if file is None else f" -- {quote(file)}"
    return Finding(
        Cause("code", what, file, line, commit.hash),
        confidence,
        (evidence,),
        "B, run again without this commit, still differs from A there",
        f"git -C {quote(str(history.repository))} show {commit.hash[:10]}{path}",
    )


def static_finding(case: Case, history: History) -> Finding:
    """Return the commit that acts nearest, of what no replay can show, as a batch."""
    best = min(reversed(history.acting), key=lambda item: nearness(case, item.file))
    rivals = [item for item in history.acting if nearness(case, item.file) == nearness(case, best.file)]
    only = len(rivals) == 1
    found = commit_finding(case, history, best.commit, best.file, "medium" if only else "low")
    if len(history.acting) == 1:
        return replace(found, confidence="high")
    others = listed(
        [f"{item.commit.hash[:10]} ({item.file.path})" for item in history.acting if item is not best]
    )
    return found.with_evidence(f"further commits that could act: {others}")
