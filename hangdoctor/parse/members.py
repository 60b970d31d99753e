"""The files of a folder or of a tar, one after the other, in memory: nothing is ever written or
extracted.

Limits protect the machine from a hostile or broken input: 256 MiB a file, 32 GiB and two million
files in all. Links, pipes and devices are skipped, so that reading cannot block and cannot leave
the folder.
"""

import math
import os
import re
import stat
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from hangdoctor.errors import HangInputError

MAX_FILE_BYTES = 256 << 20
MAX_TOTAL_BYTES = 32 << 30
MAX_FILES = 2_000_000
TAR_MAGIC_AT = 257
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
# name, mode, uid, gid, size, mtime, checksum, type, link, magic, ..., an empty prefix
COMMON_HEADER = re.compile(
    rb"(?=(?P<name>[ -~]{1,99})\0).{124}(?P<size>[0-7]{11})[ \0].{12}(?P<sum>[0-7]{6}\0 )(?P<type>[\x0005])"
    rb".{100}ustar.{83}\0.{166}",
    re.DOTALL,
)


def members_of(path: Path, notes: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield pairs of relative path and content; `notes` receives what is skipped.

    Raises `HangInputError` for a path that does not exist.
    """
    if path.is_dir():
        found = file_members(path, folder_files(path), notes)
    elif is_tar(path):
        found = tar_members(path, notes)
    elif path.is_file():
        found = iter([(path.name, read_limited(path, notes))])
    else:
        raise HangInputError(
            f"{path} is not a folder, tar or file. Give the path that the stacks were saved to."
        )
    yield from limited(path, found, notes)


def limited(
    path: Path, found: Iterable[tuple[str, bytes]], notes: list[str], num_before: int = 0
) -> Iterator[tuple[str, bytes]]:
    """Yield members up to the limits; `num_before` were read before."""
    total = 0
    for number, (name, data) in enumerate(found, num_before):
        total += len(data)
        if number >= MAX_FILES or total > MAX_TOTAL_BYTES:
            notes.append(f"{path}: reading stopped after {number} files and {total >> 20} MiB")
            return
        yield name, data


def is_tar(path: Path) -> bool:
    """Return whether a path has the name of a tar."""
    return path.name.lower().endswith(TAR_ENDINGS)


def folder_files(folder: Path) -> Iterator[Path]:
    """Yield the paths of everything in a folder but folders, in natural order."""
    for where, folders, files in os.walk(folder):
        folders.sort(key=natural)
        yield from (Path(where, name) for name in sorted(files, key=natural))


def file_members(folder: Path, files: Iterable[Path], notes: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield those files of a folder that are regular."""
    for path in files:
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
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        notes.append(f"{path.name}: {error.strerror}")
        return b""
    if len(data) > MAX_FILE_BYTES:
        notes.append(f"{path.name}: only its first {MAX_FILE_BYTES >> 20} MiB were read")
    return data[:MAX_FILE_BYTES]


def tar_members(path: Path, notes: list[str], begin: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield the regular files of a tar in its order. A damaged tar yields what comes before the
    damage.

    Args:
        begin: where to begin in an uncompressed tar: the position of a header.
    """
    try:
        plain = is_plain(path)
        with path.open("rb") as file:
            file.seek(begin)
            if plain:
                yield from common_members(file)
            # A stream reads 10 kB at a time: only for what is compressed, where going back is slow.
            with tarfile.open(fileobj=file, mode="r:" if plain else "r|*") as tar:
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
                        yield without_top(member.name), content.read(MAX_FILE_BYTES)
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError) as error:
        notes.append(f"{path.name}: the tar is damaged after this point ({error})")


def common_members(file: BinaryIO, end: float = math.inf) -> Iterator[tuple[str, bytes]]:
    """Yield the next files of an uncompressed tar, as far as headers are of the commonest kind and
    before `end`.

    Leaves `file` at the first header that is not: tarfile, which takes ten times as long for a
    header, reads all others.
    """
    at, header = file.tell(), file.read(tarfile.BLOCKSIZE)
    while at < end and (found := common_header(header)) is not None:
        name, size_bytes = found
        data = file.read(size_bytes)
        rest = -size_bytes % tarfile.BLOCKSIZE
        following = file.read(rest + tarfile.BLOCKSIZE)
        if len(data) < size_bytes or len(following) < rest:
            break
        if name:
            yield without_top(name), data
        at, header = at + tarfile.BLOCKSIZE + size_bytes + rest, following[rest:]
    file.seek(at)


def common_header(header: bytes) -> tuple[str, int] | None:
    """Return name and size of a file in a tar by its header, or ("", 0) for a folder.

    None for every other header: another type or character set, a long name, a wrong checksum, more
    than is read of a file, the end of the tar.
    """
    match = COMMON_HEADER.fullmatch(header)
    if match is None or sum(header) - sum(match["sum"]) + sum(b" " * 8) != int(match["sum"][:6], 8):
        return None
    name, size_bytes = match["name"].decode(), int(match["size"], 8)
    if match["type"] == b"5":
        return None if size_bytes else ("", 0)
    return (name, size_bytes) if size_bytes <= MAX_FILE_BYTES and not name.endswith("/") else None


def tar_positions(path: Path, every_bytes: int) -> tuple[list[int], int]:
    """Return positions of headers in an uncompressed tar, and the number of headers up to the last.

    The first is 0, the others are at least `every_bytes` apart. They end at the first header that
    is not of the commonest kind; checksums are not verified here.
    """
    positions, at, num_headers = [0], 0, 0
    with path.open("rb", buffering=0) as file:
        while len(header := os.pread(file.fileno(), tarfile.BLOCKSIZE, at)) == tarfile.BLOCKSIZE:
            size, kind, magic = header[124:135], header[156:157], header[257:262]
            if magic != b"ustar" or kind not in (b"0", b"\0", b"5") or not size.isdigit():
                break
            if at - positions[-1] >= every_bytes:
                positions.append(at)
            num_headers += 1
            at += tarfile.BLOCKSIZE + -(-int(size, 8) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return [*positions, at], num_headers


def is_plain(path: Path) -> bool:
    """Return whether a tar is not compressed: its first header has the magic of a tar."""
    with path.open("rb") as file:
        return file.read(TAR_MAGIC_AT + 5).endswith(b"ustar")


def without_top(name: str) -> str:
    """Return a member's path without a leading `./`."""
    return name.removeprefix("./").lstrip("/")
