"""The files of a large folder or tar, with py-spy's stacks parsed by several processes.

    chunks of a path ─> forks: read files, parse stacks ─> contents in the order of the path

Four gigabytes of stacks of 100,000 ranks have a few distinct ones: a fork returns each of them once
a chunk, and any other file as it is. What is read is the same as by one process.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

from hangdoctor.errors import UnreadableDump
from hangdoctor.model import Thread
from hangdoctor.parse import members
from hangdoctor.parse.forks import forked_map, num_forks
from hangdoctor.parse.location import place_of
from hangdoctor.parse.stacks_json import HEAD, Stacks, is_stacks_json, parse_stacks_json

CHUNK_BYTES = 16 << 20
CHUNK_FILES = 500
MIN_CHUNKS = 8  # 128 MiB or 4,000 files: less is read in a second by one process


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive files of a path.

    `files` are pairs of name and content; for stacks, of name, process id and index in `stacks`. A
    note has no name. `end` is where the reading of a tar ended.
    """

    files: list[tuple[str, bytes] | tuple[str, int | None, int] | tuple[str]]
    stacks: list[tuple[Thread, ...]]
    end: int = 0


def contents_of(path: Path, notes: list[str]) -> Iterator[tuple[str, bytes | Stacks]]:
    """Yield what `members_of` yields, with the stacks of a large path parsed."""
    forks = num_forks()
    if forks > 1 and path.is_dir():
        yield from folder_contents(path, notes, forks)
    elif forks > 1 and members.is_tar(path) and is_plain_tar(path):
        yield from tar_contents(path, notes, forks)
    else:
        yield from members.members_of(path, notes)


def is_plain_tar(path: Path) -> bool:
    """Return whether a tar can be read, and is not compressed."""
    try:
        return members.is_plain(path)
    except OSError:
        return False


def folder_contents(folder: Path, notes: list[str], forks: int) -> Iterator[tuple[str, bytes | Stacks]]:
    """Yield the files of a folder."""
    files = list(islice(members.folder_files(folder), members.MAX_FILES + 1))
    chunks = [files[at : at + CHUNK_FILES] for at in range(0, len(files), CHUNK_FILES)]
    if len(chunks) < MIN_CHUNKS or len(files) > members.MAX_FILES:
        yield from members.members_of(folder, notes)
        return
    known: dict[tuple[Thread, ...], tuple[Thread, ...]] = {}
    with closing(forked_map(partial(folder_chunk, folder), chunks, forks)) as read:
        for chunk in read:
            yield from files_of(chunk, known, notes)


def tar_contents(path: Path, notes: list[str], forks: int) -> Iterator[tuple[str, bytes | Stacks]]:
    """Yield the files of an uncompressed tar; after an unusual header, by one process."""
    positions, num_files = members.tar_positions(path, CHUNK_BYTES)
    if (
        len(positions) <= MIN_CHUNKS
        or num_files > members.MAX_FILES
        or positions[-1] > members.MAX_TOTAL_BYTES
    ):
        yield from members.members_of(path, notes)
        return
    known: dict[tuple[Thread, ...], tuple[Thread, ...]] = {}
    at, bounds = 0, list(pairwise(positions))
    with closing(forked_map(partial(tar_chunk, path), bounds, forks)) as read:
        for chunk, (_, end) in zip(read, bounds, strict=True):
            yield from files_of(chunk, known, notes)
            at = chunk.end
            if at != end:
                break
    rest = members.tar_members(path, notes, at)
    yield from members.limited(path, rest, notes, num_files)


def files_of(
    chunk: Chunk, known: dict[tuple[Thread, ...], tuple[Thread, ...]], notes: list[str]
) -> Iterator[tuple[str, bytes | Stacks]]:
    """Yield the files of a chunk; equal stacks of different chunks are one object of `known`."""
    stacks = [known.setdefault(threads, threads) for threads in chunk.stacks]
    for file in chunk.files:
        if len(file) == 3:
            yield file[0], (file[1], stacks[file[2]])
        elif len(file) == 2:
            yield file
        else:
            notes.append(file[0])


def folder_chunk(folder: Path, files: list[Path]) -> Chunk:
    """Read some files of a folder."""
    notes: list[str] = []
    return chunk_of(members.file_members(folder, files, notes), notes)


def tar_chunk(path: Path, bounds: tuple[int, int]) -> Chunk:
    """Read the files of a tar between two positions."""
    begin, end = bounds
    with path.open("rb") as file:
        file.seek(begin)
        chunk = chunk_of(members.common_members(file, end), [])
        return Chunk(chunk.files, chunk.stacks, file.tell())


def chunk_of(found: Iterable[tuple[str, bytes]], notes: list[str]) -> Chunk:
    """Read files and parse the stacks in them; `notes` receives what is skipped meanwhile."""
    files: list[tuple[str, bytes] | tuple[str, int | None, int] | tuple[str]] = []
    indices: dict[tuple[Thread, ...], int] = {}
    # By identity, with the stacks so that these stay: hashing them takes longer than their parsing.
    places: dict[int, tuple[int, tuple[Thread, ...]]] = {}
    for name, data in found:
        files += ((note,) for note in notes)
        notes.clear()
        parsed = stacks_in(name, data)
        if parsed is None:
            files.append((name, data))
            continue
        pid, threads = parsed
        if id(threads) not in places:
            places[id(threads)] = indices.setdefault(threads, len(indices)), threads
        files.append((name, pid, places[id(threads)][0]))
    files += ((note,) for note in notes)
    return Chunk(files, list(indices))


def stacks_in(name: str, data: bytes) -> Stacks | None:
    """Return the stacks in a file of py-spy's JSON; None for any other, also a damaged one."""
    place = place_of(name)
    if place.kind not in ("samples", "loose") or place.file == "collection.json":
        return None
    if not is_stacks_json(data[:HEAD].decode(errors="replace")):
        return None
    try:
        return parse_stacks_json(data)
    except UnreadableDump:
        return None
