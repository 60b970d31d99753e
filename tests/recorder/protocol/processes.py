"""The real writers, lock, retention, resume, archive and reader as processes of the checker."""

import hashlib
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

import recorder.reader as reader
import recorder.writer as writing
from areal_core.safety import lock as protocol
from areal_core.safety.lock import Held, Holder
from recorder import DamagedRecord, NotARecord, RecordNotFound, RecordWriter
from recorder.archive.live_archive import LiveArchive
from recorder.format import RecordHeader, Recording
from recorder.retention import Retention
from recorder.step_files import RankStep
from recorder.tensors import flatten
from recorder.testing import SCRIPTED_HEADER, in_step, scripted_batch
from recorder.writer import RecordingOptions

from .disk import FOLDER, ROOT, Disk, Machine, is_ours

verifying = importlib.import_module("recorder.verify")  # the package has a function of this name
RECORD = Path(ROOT) / "record"


class SimulatedStorage:
    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine, self.folder = machine, folder

    def names(self, folder: str) -> list[str]:
        try:
            return [name for name, _ in self.machine.call("scan", str(self.folder / folder))]
        except OSError:
            return []

    def size(self, file: str) -> int | None:
        try:
            size = self.machine.call("stat", str(self.folder / file))
        except OSError:
            return None
        return None if size == FOLDER else size

    def read(self, file: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        try:
            data = self.machine.call("read", str(self.folder / file))
        except OSError:
            return b""
        return data[offset:] if size_bytes is None else data[offset : offset + size_bytes]

    def local_folder(self, folder: str) -> Path:
        return self.folder / folder


class Simulation:
    """The machine, and which simulated process it runs at the moment."""

    def __init__(self) -> None:
        self.machine, self.pid, self.num_ranks = Machine(), 0, 1

    def process(self, pid: int, body: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            self.pid = pid
            return body()

        return run

    def mark(self, *what: Any) -> None:
        """Note that something has happened."""
        self.machine.call("mark", *what)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put simulated clocks, processes and storage under the recorder."""
        call = self.machine.call
        commit, read = writing.commit_step, protocol._read

        def read_lock(path: Path) -> Holder | None:
            if not is_ours(path):
                return read(path)
            try:
                token = call("read", str(path)).decode()
            except OSError:
                return None
            return Holder(token, "run", "", "here", 1, "now")

        def commit_and_mark(folder: Path, step: int, *rest: Any) -> Any:
            manifest = commit(folder, step, *rest)
            self.mark("committed", step)
            return manifest

        def take(path: Path, run: str, name: str, token: str) -> SimpleNamespace:
            if not call("take", str(path), token, self.pid):
                raise Held("another process")

            def release() -> None:
                protocol.check(path, token)
                call("unlink", str(path))
                self.mark("released", self.pid)

            return SimpleNamespace(release=release, leave=lambda: None)

        replacements = [
            (protocol, "_read", read_lock),
            (writing, "new_token", lambda: f"token{self.pid}"),
            (writing, "describe_run", lambda facts, recording: header_of(self.num_ranks)),
            (writing, "commit_step", commit_and_mark),
            ("recorder.lock", "take", take),
            ("recorder.lock", "live_holder", lambda path, run="": None),
            ("recorder.archive.live_archive", "open_record", reader.open_record),
            ("recorder.archive.live_archive", "layout_bytes", layout_names),
            ("recorder.lock", "run_id", lambda: f"run{self.pid}"),
            (reader, "open_storage", lambda path: SimulatedStorage(self.machine, Path(path))),
            (verifying, "open_storage", lambda path: SimulatedStorage(self.machine, Path(path))),
        ]
        with ExitStack() as stack:
            for place, name, value in replacements:
                patch = (
                    mock.patch(f"{place}.{name}", value)
                    if isinstance(place, str)
                    else mock.patch.object(place, name, value)
                )
                stack.enter_context(patch)
            stack.enter_context(self.machine.installed())
            yield

    def waiting(self) -> Any:
        """In place of the event that ends rank 0's wait: the wait is an operation."""
        return SimpleNamespace(
            wait=lambda seconds: self.machine.call("await", self.last_absent()), set=lambda: None
        )

    def last_absent(self) -> str:
        """The path that the running process has just found to be absent."""
        return self.machine.last_path

    def writer(self, pid: int, rank: int = 0, num_ranks: int = 1, **options: Any) -> RecordWriter:
        """A writer of a run; `pid` also names its lock."""
        self.pid = pid
        with mock.patch.object(writing, "check_folder"):
            made = RecordWriter(RECORD, rank, num_ranks, options=RecordingOptions(**options))
        made.stop_waiting = self.waiting()
        made.notify = lambda sentence: None
        return made


def header_of(num_ranks: int) -> RecordHeader:
    return replace(SCRIPTED_HEADER, num_ranks=num_ranks, world_size=num_ranks, recording=Recording("rollout"))


def layout_names(layout: dict[str, list[Any]]) -> bytes:
    """In place of an archive's layout: the names of its objects."""
    return "\n".join(part.name for parts in layout.values() for part in parts).encode()


def value_of(run: int, step: int, rank: int) -> int:
    """The only number in a rank's batch: it names run, step and rank."""
    return 100 * run + 10 * step + rank


def rank_step(run: int, step: int, rank: int) -> RankStep:
    """The smallest step: a batch of one number."""
    batch = in_step(scripted_batch([1]), step, rank)
    batch["rewards"] = np.array([value_of(run, step, rank)], np.float32)
    return RankStep(step, step + 1, flatten(batch))


def read_record() -> tuple[dict[int, list[int]], Any, Any] | None:
    """Read every value of every committed step, gaps and problems; None if there is no record."""
    try:
        record = reader.open_record(RECORD)
    except (NotARecord, RecordNotFound):
        return None
    values = {}
    for number in record.steps:
        step = record.step(number)
        ranks = range(step.manifest.num_ranks)
        values[number] = [int(step.batch(rank, ["rewards"])["rewards"][0]) for rank in ranks]
    return values, record.gaps, verifying.verify(RECORD).problems


def begun(simulation: Simulation, num_ranks: int = 1) -> Disk:
    """A disk with the empty record of run 0, whose lock is held by process 0."""

    simulation.num_ranks = num_ranks

    def start() -> None:
        simulation.writer(0, num_ranks=num_ranks).begin({"config": {}})

    return simulation.machine.on(Disk(), start)[1]


def whole_run(simulation: Simulation, pid: int, first_step: int = 0, num_steps: int = 1) -> Any:
    """A run of one rank from its start, which replaces or resumes the record, to its end."""

    def body() -> None:
        writer = simulation.writer(pid, overwrite=True, first_step=first_step)
        writer.begin({"config": {}})
        writer.lock_token = writer.token
        for step in range(first_step, first_step + num_steps):
            writer.record(partial(rank_step, pid, step, 0))
        writer.unlock(None)

    return simulation.process(pid, body)


def reading(simulation: Simulation, pid: int, num_ranks: int) -> Any:
    """A reader of every committed step of run 0."""

    def body() -> str:
        try:
            record = reader.open_record(RECORD)
        except (NotARecord, RecordNotFound):
            return "no record"
        for number in record.steps:
            try:
                step = record.step(number)
                values = [int(step.batch(rank, ["rewards"])["rewards"][0]) for rank in range(num_ranks)]
            except DamagedRecord:
                simulation.mark("unreadable", number)
            else:
                if values != [value_of(0, number, rank) for rank in range(num_ranks)]:
                    return f"WRONG: step {number} reads as {values}"
        return "read"

    return simulation.process(pid, body)


class Stream:
    """In place of zarr's arrays: every append is an object without fsync."""

    def __init__(self, machine: Machine, location: Path) -> None:
        self.machine, self.location = machine, location
        self.written: set[str] = set()
        self.count = 0

    def append(self, column: str, dtype: str, data: Any) -> SimpleNamespace:
        """Write an object that is named by its contents."""
        self.count += 1
        name = f"{column}-{self.count}-{hashlib.sha256(bytes(data)).hexdigest()[:8]}"
        with open(self.location / name, "wb") as file:
            file.write(bytes(data))
        self.written.add(name)
        return SimpleNamespace(name=name)


class Group:
    """In place of a zarr group: creating one below it creates its folders and renames zarr.json."""

    def __init__(self, location: Path) -> None:
        self.location = location

    def create_group(self, folder: str, attributes: Any) -> None:
        """Commit a layout."""
        place = self.location / folder
        place.mkdir(parents=True, exist_ok=True)
        with open(place / "zarr.json.partial", "wb") as file:
            file.write(attributes["layout"][0].encode())
        os.rename(place / "zarr.json.partial", place / "zarr.json")


def archiving(simulation: Simulation, steps: range) -> Any:
    """Rank 0 of a run that moves every committed step into an archive."""

    def body() -> None:
        writer = simulation.writer(0)
        writer.lock_token = "token0"
        location = Path(ROOT) / "archive"
        moving = object.__new__(LiveArchive)
        moving.staging, moving.location, moving.anchors = RECORD, str(location), set()
        moving.group, moving.stream = Group(location), Stream(simulation.machine, location)
        writer.archive = moving
        for step in steps:
            writer.record(partial(rank_step, 0, step, 0))
            simulation.mark("archived", step)

    return simulation.process(0, body)


def archived_step(machine: Machine, step: int) -> bool | None:
    """Return whether a step's objects are whole in the archive; None if it is not committed."""
    archive = Path(ROOT) / "archive"
    try:
        layout = machine.call("read", str(archive / f"steps/{step:06d}/zarr.json")).decode()
    except OSError:
        return None
    if not layout:  # zarr renames it before it is fsynced: not committed before `sync_objects`
        return None
    try:
        names = machine.call("read", str(archive / layout)).decode().split()
        return all(
            hashlib.sha256(machine.call("read", str(archive / n))).hexdigest()[:8] == n.rpartition("-")[2]
            for n in [layout, *names]
        )
    except OSError:
        return False


def recording(simulation: Simulation, rank: int, num_ranks: int, steps: range, keep_last: int | None) -> Any:
    """The writer thread of one rank of run 0, whose folder is locked and empty."""

    def body() -> None:
        limits = Retention(keep_last=keep_last)
        writer = simulation.writer(rank, rank, num_ranks, retention=limits)
        writer.lock_token = "token0"
        for step in steps:
            writer.record(partial(rank_step, 0, step, rank))

    return simulation.process(rank, body)
