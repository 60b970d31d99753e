"""Check out commits of a repository in a private one that shares its objects.

The user's repository is only read: nothing is registered in it, so a process that is killed leaves
a folder in the temporary directory and no more, which the next one removes.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from areal_core.launch.torchrun import ended_on_signals
from areal_core.safety.private import make_private
from areal_core.safety.scratch import FolderInUse, locked_folder
from replayer.commits.repository import git


@dataclass
class Checkout:
    """A private working tree; `commit` is the one that it has now, "" before the first."""

    repository: Path
    place: Path
    commit: str = ""

    def switch(self, commit: str) -> Path:
        """Check out a commit, without a compiled file of another one, and return the folder.

        Raises NothingToBisect.
        """
        wanted = git(self.repository, "rev-parse", f"{commit}^{{commit}}").strip()
        if self.commit and self.commit != wanted:
            # Python compares seconds and sizes, which may be equal in both commits
            changed = git(self.place, "diff", "--name-only", "-z", self.commit, wanted, "--", "*.py")
            for name in filter(None, changed.split("\0")):
                Path(cache_from_source(str(self.place / name))).unlink(missing_ok=True)
        hooks_off = ("-c", f"core.hooksPath={os.devnull}")
        git(self.place, *hooks_off, "checkout", "--quiet", "--force", "--detach", wanted)
        self.commit = wanted
        return self.place


@contextmanager
def checkout(repository: Path) -> Iterator[Checkout]:
    """Make a private repository beside the user's, and remove it, also when a signal ends us.

    Raises NothingToBisect for a folder without a repository.
    """
    objects = Path(repository, git(repository, "rev-parse", "--git-path", "objects").strip()).resolve()
    with ended_on_signals(), private_folder() as folder:
        place = folder / "code"
        git(folder, "init", "--quiet", str(place))
        (place / ".git" / "objects" / "info" / "alternates").write_text(f"{objects}\n")
        yield Checkout(repository, place)


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a temporary folder of this process; remove those of processes that were killed."""
    root = Path(tempfile.gettempdir(), f"areal-debug-commits-{os.getuid()}")
    make_private(root)
    for left in root.iterdir():
        remove_unless_used(left)
    folder = Path(tempfile.mkdtemp(dir=root))
    handle = locked_folder(folder)
    try:
        yield folder
    finally:
        compiled = Path(cache_from_source(str(folder / "any.py"))).parent  # elsewhere, if so configured
        for made in (folder, compiled):
            shutil.rmtree(made, ignore_errors=True)
        os.close(handle)


def remove_unless_used(folder: Path) -> None:
    try:
        handle = locked_folder(folder)
    except FolderInUse:
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(handle)
