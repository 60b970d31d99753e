"""The commits of a repository, which is only read."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from replayer.errors import NothingToBisect

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
            f"there is no commit between {good} and {bad}: --good must be an ancestor of --bad"
        )
    return commits


def has_commit(repository: Path, commit: str) -> bool:
    """Return whether the repository has a commit."""
    command = ["git", "-C", str(repository), "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, capture_output=True).returncode == 0


def git(repository: Path, *arguments: str) -> str:
    """Return the output of a git command. Raises NothingToBisect with its error message."""
    done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise NothingToBisect(f"git {arguments[0]} in {repository}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout
