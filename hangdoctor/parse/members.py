"""The files of a folder or of a tar, one after the other, in memory: nothing is ever written or
extracted.

Limits protect the machine from a hostile or broken input: 256 MiB a file, 32 GiB and two million
files in all. Links, pipes and devices are skipped, so that reading cannot block and cannot leave
the folder.
"""

import os
import stat
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from areal_core.safety.received import UnreadableFile, open_received
from hangdoctor.errors import HangInputError

MAX_FILE_BYTES = 256 << 20
MAX_TOTAL_BYTES = 32 << 30
MAX_FILES = 2_000_000
TAR_MAGIC_AT = 257
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


def members_of(path: Path, notes: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield pairs of relative path and content; `notes` receives what is skipped.

    Raises `HangInputError` for a path that does not exist.
    """
    if path.is_dir():
        found = folder_members(path, notes)
    elif path.name.lower().endswith(TAR_ENDINGS):
        found = tar_members(path, notes)
    elif path.is_file():
        found = iter([(path.name, read_limited(path, notes))])
    else:
        raise HangInputError(
            f"{path} is not a folder, tar or file. Give the path that the stacks were saved to."
        )
    total = 0
    for number, (name, data) in enumerate(found):
        total += len(data)
        if number >= MAX_FILES or total > MAX_TOTAL_BYTES:
            notes.append(f"{path}: reading stopped after {number} files and {total >> 20} MiB")
            return
        yield name, data


def folder_members(folder: Path, notes: list[str]) -> Iterator[tuple[str, bytes]]:
    for where, folders, files in os.walk(folder):
        folders.sort(key=natural)
        for name in sorted(files, key=natural):
            path = Path(where) / name
            if stat.S_ISREG(path.lstat().st_mode):
                yield str(path.relative_to(folder)), read_limited(path, notes)
            else:
                notes.append(f"{path.relative_to(folder)}: not a regular file, skipped")


def natural(name: str) -> tuple[int, str]:
    """Sort key that puts rank_10 after rank_9 by length first, without parsing every number."""
    return len(name), name


def read_limited(path: Path, notes: list[str]) -> bytes:
    """Return the first 256 MiB of a file; empty, with a note, where it cannot be read."""
    try:
        with open_received(path) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, UnreadableFile) as error:
        notes.append(f"{path.name}: {error.strerror if isinstance(error, OSError) else error}")
        return b""
    if len(data) > MAX_FILE_BYTES:
        notes.append(f"{path.name}: only its first {MAX_FILE_BYTES >> 20} MiB were read")
    return data[:MAX_FILE_BYTES]


class Header(tarfile.TarInfo):
    """A header of a tar: a damaged one is an error, where `tarfile` ends as after the last file."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except tarfile.InvalidHeaderError as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(f"{error}") from error


def tar_members(path: Path, notes: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the regular files of a tar in its order. A damaged tar yields what comes before the
    damage.
    """
    try:
        # A stream reads 10 kB at a time: only for what is compressed, where going back is slow.
        with (
            open_received(path) as file,
            tarfile.open(fileobj=file, mode="r:" if is_plain(path) else "r|*", tarinfo=Header) as tar,
        ):
            for member in iter(tar.next, None):
                tar.members.clear()  # type: ignore[attr-defined]  # else it keeps 1 kB of each
                if not member.isreg():
                    continue
                if member.size > MAX_FILE_BYTES:
                    # Skipping it would mean reading through a size that only the header claims.
                    notes.append(
                        f"{member.name[:200]}: larger than {MAX_FILE_BYTES >> 20} MiB, the tar was read up to it"
                    )
                    return
                content = tar.extractfile(member)
                if content is not None:
                    yield member.name.removeprefix("./").lstrip("/"), content.read(MAX_FILE_BYTES)
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError) as error:
        notes.append(f"{path.name}: the tar is damaged after this point ({error})")


def is_plain(path: Path) -> bool:
    """Return whether a tar is not compressed: its first header has the magic of a tar."""
    with open_received(path) as file:
        return file.read(TAR_MAGIC_AT + 5).endswith(b"ustar")
