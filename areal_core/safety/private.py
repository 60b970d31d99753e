"""Folders and files of one user on a machine that several share.

A folder that users share, such as `/tmp` or a team's storage, has one folder per user in it. That
one is readable by its user only, and used only if it is theirs: in `/tmp` anybody can be faster.
"""

import atexit
import os
import pwd
import stat
import tempfile
from functools import cache
from pathlib import Path

from areal_core.safety.file_names import UnsafeName

PRIVATE, GROUP_READABLE = 0o077, 0o027  # umasks
OTHERS_MAY_WRITE, GROUP_MAY_READ = 0o022, 0o050


class ForeignOwner(ValueError):
    """A file or folder that must be the user's own belongs to somebody else."""


def default_root() -> str:
    """Return the folder of this user in `/tmp`: `/tmp/areal-UID`."""
    return f"/tmp/areal-{os.getuid()}"


def default_names_root() -> str:
    """Return the folder of this user in which servers are registered by default."""
    return f"{default_root()}/name_resolve"


@cache
def fresh_folder() -> str:
    """Return a new folder of this process, which is removed at its end."""
    folder = tempfile.TemporaryDirectory(prefix="areal-")
    atexit.register(folder.cleanup)
    return folder.name


def keep_files_private(group_readable: bool = False) -> int:
    """Let this process and those that it starts create files with mode 0600 and folders with 0700,
    or with 0640 and 0750; return the umask that it had.
    """
    return os.umask(GROUP_READABLE if group_readable else PRIVATE)


def make_shared(folder: Path) -> None:
    """Create a folder, and those above it, with the access of the folder that it is in.

    So one in `/tmp` is open to all users and sticky, and one in a team's storage is the team's.
    """
    if not folder.is_dir():
        make_shared(folder.parent)
        try:
            folder.mkdir()
        except FileExistsError:  # another process was faster
            return
        folder.chmod(stat.S_IMODE(folder.parent.stat().st_mode) & ~stat.S_ISUID)


def make_private(folder: Path, group_readable: bool = False) -> None:
    """Create the folder of one user in a shared one, or check that an existing one is theirs.

    Raises:
        ForeignOwner: it belongs to somebody else, or is a link or file.
    """
    make_shared(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        check_owner(folder)
    mode = stat.S_IMODE(folder.stat().st_mode)
    wanted = mode & ~OTHERS_MAY_WRITE | (GROUP_MAY_READ if group_readable else 0)
    if wanted != mode:
        folder.chmod(wanted)


def check_owner(path: Path) -> None:
    """Raise ForeignOwner unless a file or folder, no link, belongs to this user or to root."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise ForeignOwner(
            f"{path} is a link, which is not followed here: remove it, or choose another folder"
        )
    if not is_ours(path, found.st_uid):
        raise ForeignOwner(
            f"{path} belongs to {user_name(found.st_uid)} and not to {user_name(os.geteuid())}: "
            "it is not used; choose another folder, or let its owner remove it"
        )


def is_ours(path: Path, uid: int) -> bool:
    """Return whether this user is the owner `uid` of a path.

    Network storage may give what root creates to another user: then a new file shows who we are.
    """
    if uid in (os.geteuid(), 0):
        return True
    if os.geteuid() != 0:
        return False
    try:
        with tempfile.NamedTemporaryFile(dir=path if path.is_dir() else path.parent) as probe:
            return os.fstat(probe.fileno()).st_uid == uid
    except OSError:
        return False


def read_owned(path: Path) -> str:
    """Return the text of a file of this user.

    Raises:
        ForeignOwner: it belongs to somebody else.
        UnsafeName: it is a link or no regular file.
        FileNotFoundError: there is none.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise UnsafeName(f"{path} is a link: it is not followed") from error
        if isinstance(error, PermissionError):
            check_owner(path)
        raise
    with os.fdopen(descriptor) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafeName(f"{path} is no regular file")
        check_owner(path)
        return file.read()


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
