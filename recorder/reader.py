"""Read a record lazily: opening lists one folder; reads touch and check only what they return.

`open_record` opens a folder, an archive or a URL; `summarise_steps` reduces each step to a few
numbers, for which it reads step.json and the rewards.
"""

import os
import zipfile
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from areal_core.safety.received import open_received
from recorder.documents import (
    MAX_JSON_BYTES,
    parse_as,
    parse_checksummed,
    parse_document,
)
from recorder.errors import DamagedRecord, NotARecord, RecordNotFound, StepNotRecorded
from recorder.format import (
    ANCHOR_FILE,
    ANCHORS_FOLDER,
    BATCH_KEYS,
    END_FILE,
    GAPS_FILE,
    LARGEST_VALUES,
    RECORD_FILE,
    STEP_FILE,
    STEPS_FOLDER,
    TOP_FILES,
    UNKNOWN_BITS,
    BatchEntry,
    EndMark,
    FileEntry,
    Outcome,
    Plan,
    RecordHeader,
    StepManifest,
    parse_anchor,
    parse_end,
    parse_header,
    parse_step,
    parse_text_line,
    rank_file,
    step_name,
    step_number,
)
from recorder.header import Gaps, in_ranges, parse_gaps
from recorder.pictures.named import check_images, picture_names, read_picture
from recorder.storage import FolderStorage, KeptFiles, Storage, is_url, location_of
from recorder.tensors import check_header, check_offsets, check_size, read_tensor
from recorder.transcripts import Transcript, parse_transcripts

if TYPE_CHECKING:
    import pandas
    import pyarrow


KEPT_OF_STEP = 1 << 20  # bytes of its files that a step keeps: small ones are opened once


@dataclass(frozen=True)
class RecordedStep:
    """A committed step. Every method raises DamagedRecord if bytes differ from those written."""

    storage: Storage
    manifest: StepManifest

    @property
    def ranks(self) -> range:
        """The data-parallel ranks that recorded."""
        return range(self.manifest.num_ranks)

    def batch(self, rank: int, keys: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Read a rank's flat arrays: [tokens, ...], [rows, ...], `cu_seqlens` [rows + 1] int64.

        Dtypes are those of the trainer; bfloat16 and 8-bit floats are returned as bits in unsigned
        integers.

        Args:
            rank: data-parallel rank, from 0.
            keys: names of the arrays to read; all by default.

        Raises:
            StepNotRecorded: there is no such rank or array.
        """
        return self.tensors(*self.batch_entry(rank), keys)

    def learning(self, rank: int, keys: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Read the inputs to a rank's loss (`advantages`, ...), [tokens], next-token aligned.

        Raises:
            StepNotRecorded: they are not in the record: its scope is not "full", or another
                trainer gave none.
        """
        name = self.rank_name("learning", rank, "safetensors")
        if name not in self.manifest.batches:
            raise not_in_scope(self.name_of(name), "full")
        return self.tensors(name, self.manifest.batches[name], keys)

    @property
    def has_tokens(self) -> bool:
        """Whether the tokens of any row are known."""
        return any(self.known(rank, "input_ids").any() for rank in range(self.manifest.num_ranks))

    @property
    def is_given(self) -> bool:
        """Whether its rows are those of a data set: nothing says that they were sampled."""
        unknown, total = self.num_unknown(), sum(map(self.num_rows, self.ranks))
        return all(unknown.get(name) == total for name in ("logprobs", "versions", "rewards"))

    def trainer_logprobs(self, rank: int) -> np.ndarray | None:
        """Read the trainer's own log-probs before the update, [tokens], next-token aligned.

        None if there are none. A trainer that computes none gives its loss those of the engine.
        """
        learning = self.manifest.batches.get(self.rank_name("learning", rank, "safetensors"))
        if learning is None or "prox_logp" not in learning.tensors:
            return None
        found, batch = (
            self.learning(rank, ["prox_logp"])["prox_logp"],
            self.batch(rank, ["logprobs", "loss_mask"]),
        )
        at = np.flatnonzero(batch["loss_mask"][1:])
        is_copy = np.array_equal(found[at], batch["logprobs"][at + 1], equal_nan=True)
        return None if is_copy and len(at) and "entropy" not in learning.tensors else found

    def tensors(
        self, name: str, entry: BatchEntry, keys: Iterable[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Read arrays of one of the step's safetensors files; all unless `keys` are given."""
        wanted = list(entry.tensors) if keys is None else list(keys)
        file = self.name_of(name)
        if missing := [key for key in wanted if key not in entry.tensors]:
            raise StepNotRecorded(f"{file} has no {missing}: it has {sorted(entry.tensors)}")
        check_header(self.storage, file, entry)
        arrays = {key: read_tensor(self.storage, file, key, entry.tensors[key]) for key in wanted}
        if "cu_seqlens" in arrays:
            check_offsets(file, arrays["cu_seqlens"], entry)
        for key in LARGEST_VALUES.keys() & arrays.keys():
            if ((arrays[key] < 0) | (arrays[key] > LARGEST_VALUES[key])).any():
                raise DamagedRecord(file, f"has values that are not from 0 to {LARGEST_VALUES[key]}", key)
        if arrays.keys() & {"image_count", "image_bytes", "image_units"}:
            check_images(file, arrays, entry)
        return arrays

    def rows(self, rank: int, row: int) -> dict[str, np.ndarray]:
        """Read one row of a rank: per token [length, ...], per row [...]; without its pictures.

        Raises:
            StepNotRecorded: there is no such rank or row.
        """
        _, entry = self.batch_entry(rank)
        self.check_row(rank, row)
        arrays = self.batch(rank)
        begin, end = arrays.pop("cu_seqlens")[row : row + 2]
        return {
            key: array[begin:end] if entry.tensors[key].axis == "token" else array[row]
            for key, array in arrays.items()
            if entry.tensors[key].axis in ("token", "row")
        }

    def pictures(self, rank: int) -> list[tuple[str, int]] | None:
        """Return the sha256 and bytes of each picture of a rank, in the order of its rows.

        None if the batch has none as files: it is of text, or has pixels instead.
        """
        name, entry = self.batch_entry(rank)
        if "image_sha256" not in entry.tensors:
            return None
        arrays = self.tensors(name, entry, ["image_sha256", "image_bytes"])
        return list(zip(picture_names(arrays["image_sha256"]), arrays["image_bytes"].tolist(), strict=True))

    def pictures_of_rows(self, rank: int) -> list[list[tuple[str, int]]]:
        """Return the sha256 and bytes of the pictures of each row of a rank."""
        found = self.pictures(rank)
        if found is None:
            return [[] for _ in range(self.num_rows(rank))]
        name, entry = self.batch_entry(rank)
        ends = np.cumsum(self.tensors(name, entry, ["image_count"])["image_count"]).tolist()
        return [found[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def named_pictures(self) -> dict[str, int]:
        """Return the bytes of each picture of the step, on any rank, by its sha256."""
        return {name: size for rank in self.ranks for name, size in self.pictures(rank) or ()}

    def images(self, rank: int) -> tuple[tuple[bytes, ...], ...] | None:
        """Return the encoded pictures of each row; None if the record has none as files."""
        if (found := self.pictures(rank)) is None:
            return None
        each = {name: self.picture(name, size) for name, size in dict(found).items()}
        return tuple(tuple(each[name] for name, _ in row) for row in self.pictures_of_rows(rank))

    def image_data(self, rank: int) -> np.ndarray:
        """Return the bytes of a rank's pictures one after another, as the trainer had them: U8."""
        rows = self.images(rank) or ()
        return np.frombuffer(bytearray().join(picture for row in rows for picture in row), np.uint8)

    def picture(self, name: str, size_bytes: int) -> bytes:
        """Read and check the picture of a sha256."""
        return read_picture(self.storage, name, size_bytes)

    def known(self, rank: int, key: str) -> np.ndarray:
        """Return [rows] bool: whether the trainer knew the row's value under a key of the batch."""
        name, entry = self.batch_entry(rank)
        if key not in entry.tensors:
            return np.zeros(entry.num_rows, bool)
        if "unknown" not in entry.tensors or key not in UNKNOWN_BITS:
            return np.ones(entry.num_rows, bool)
        bits = self.tensors(name, entry, ["unknown"])["unknown"]
        return (bits & UNKNOWN_BITS[key]) == 0

    def num_unknown(self) -> dict[str, int]:
        """Count the rows of all ranks that lack a value that every batch has, by key."""
        counts: Counter[str] = Counter()
        for rank in self.ranks:
            name, entry = self.batch_entry(rank)
            if "unknown" in entry.tensors:
                bits = self.tensors(name, entry, ["unknown"])["unknown"]
                for key in UNKNOWN_BITS.keys() & BATCH_KEYS.keys():
                    counts[key] += int(((bits & UNKNOWN_BITS[key]) != 0).sum())
        return {key: counts[key] for key in UNKNOWN_BITS if counts[key]}

    def plan(self, rank: int) -> Plan:
        """Read the rank's plan.

        Raises:
            StepNotRecorded: the scope of the record is "rollout", or another trainer gave none.
        """
        return parse_as(Plan, *self._json("plan", rank))

    def outcome(self, rank: int) -> Outcome:
        """Read the rank's outcome. Raises as `plan` does."""
        return parse_as(Outcome, *self._json("outcome", rank))

    def _json(self, kind: str, rank: int) -> tuple[Any, str]:
        name = self.rank_name(kind, rank, "json")
        if name not in self.manifest.files:
            raise not_in_scope(self.name_of(name), "plan")
        return parse_document(self.file(name), self.name_of(name)), self.name_of(name)

    def text(self, rank: int) -> list[dict[str, Any]] | None:
        """Read the text of each row, in order; None if text was not recorded."""
        name = self.rank_name("text", rank, "jsonl")
        if name not in self.manifest.files:
            return None
        file, lines = self.name_of(name), self.file(name).splitlines()
        if len(lines) != self.num_rows(rank):
            raise DamagedRecord(file, f"has {len(lines)} lines, {self.num_rows(rank)} expected")
        rows = [parse_text_line(parse_document(line, file), file) for line in lines]
        if wrong := [row["row"] for index, row in enumerate(rows) if row["row"] != index]:
            raise DamagedRecord(file, f"has row {wrong[0]} in the place of another")
        return rows

    def calls(self, rank: int) -> list[Transcript] | None:
        """Read the episodes of an agent; None if there was none, or text was not recorded."""
        name = self.rank_name("calls", rank, "jsonl")
        if name not in self.manifest.files:
            return None
        return parse_transcripts(self.file(name), self.name_of(name))

    def batch_entry(self, rank: int) -> tuple[str, BatchEntry]:
        """Name and entry of the rank's batch file."""
        name = self.rank_name("batch", rank, "safetensors")
        return name, self.manifest.batches[name]

    def num_rows(self, rank: int) -> int:
        """Rows in the rank's batch."""
        return self.batch_entry(rank)[1].num_rows

    def check_row(self, rank: int, row: int) -> None:
        """Raise StepNotRecorded unless the rank has the row."""
        if not 0 <= row < self.num_rows(rank):
            raise StepNotRecorded(
                f"step {self.manifest.step}, rank {rank} has rows 0 to {self.num_rows(rank) - 1}, not {row}"
            )

    def rank_name(self, kind: str, rank: int, suffix: str) -> str:
        """Return the rank's file name of a kind.

        Raises StepNotRecorded for a rank that did not record.
        """
        num_ranks = self.manifest.num_ranks
        if not 0 <= rank < num_ranks:
            raise StepNotRecorded(f"step {self.manifest.step} has ranks 0 to {num_ranks - 1}, not {rank}")
        return rank_file(kind, rank, num_ranks, suffix)

    def name_of(self, name: str) -> str:
        """Path of the file inside the record, for messages."""
        return f"{STEPS_FOLDER}/{step_name(self.manifest.step)}/{name}"

    def file(self, name: str) -> bytes:
        """Read and check a file that has one checksum for all of its bytes."""
        return checked_file(self.storage, self.name_of(name), self.manifest.files[name])


def not_in_scope(file: str, scope: str) -> StepNotRecorded:
    return StepNotRecorded(f"{file} was not recorded: it needs debug.dump_scope={scope} or a larger one")


@dataclass
class Damage:
    """What a reader that continues with the rest has left out: each error once, as it was found."""

    found: dict[str, DamagedRecord] = field(default_factory=dict)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Keep the DamagedRecord that the body raises, and go on behind it."""
        try:
            yield
        except DamagedRecord as error:
            self.found.setdefault(error.problem, error)


@dataclass(frozen=True)
class Record:
    """A record, in a folder or an archive, as `open_record` returns it.

    Attributes:
        path: the path or URL that it was opened with.
        storage: reads its files.
        header: the content of record.json: config, environment, model and tokenizer of the run.
        steps: the committed steps, ascending, counted from 0.
        uncommitted: steps that were being written when the run ended, ascending.
        gaps: steps that are missing for a known reason.
    """

    path: str
    storage: Storage
    header: RecordHeader
    steps: tuple[int, ...]
    uncommitted: tuple[int, ...]
    gaps: Gaps = field(default_factory=Gaps)

    def __repr__(self) -> str:
        return f"Record({self.path!r}, {describe_steps(self.steps)})"

    def step(self, step: int) -> RecordedStep:
        """Return a committed step.

        Raises:
            StepNotRecorded: the record has no such step; the message has the reason.
            DamagedRecord: its step.json is damaged.
        """
        place = bisect_left(self.steps, step)
        if self.steps[place : place + 1] != (step,):
            raise StepNotRecorded(
                f"step {step} {self.why_missing(step)} in {self.path}: it holds {describe_steps(self.steps)}"
            )
        manifest = read_manifest(self.storage, step)
        return RecordedStep(KeptFiles(self.storage, room_bytes=KEPT_OF_STEP), manifest)

    def why_missing(self, step: int) -> str:
        if step in self.uncommitted:
            return "was not finished"
        if not self.header.recording.wants(step):
            return "was not selected for recording"
        return self.gaps.reason(step) or "is not recorded"

    def to_arrow(
        self, steps: Sequence[int] | None = None, columns: Sequence[str] | None = None
    ) -> "pyarrow.Table":
        """Return the samples, one a row, as an Arrow table. Needs the extra `archive`.

        Values per token are lists, aligned to the token itself; what is not known is null.

        Args:
            steps: those to read; all by default.
            columns: those to read, in this order; all by default (docs/verbs/record.md).

        Raises:
            RecordError: there is no such column.
            StepNotRecorded: there is no such step.
            DamagedRecord: bytes differ from those written.
        """
        return self._exporter("arrow").table_of(self, steps, columns)

    def to_pandas(
        self, steps: Sequence[int] | None = None, columns: Sequence[str] | None = None
    ) -> "pandas.DataFrame":
        """Return what `to_arrow` returns as a data frame. Needs the extra `query`.

        Integers keep their types; unknown ones are `pandas.NA`.
        """
        return self._exporter("arrow").frame_of(self, steps, columns)

    def _repr_html_(self) -> str:
        return self._exporter("html").html_of(self)

    def _exporter(self, name: str) -> ModuleType:
        return import_module(f"recorder.tables.{name}")

    def anchors(self) -> tuple[int, ...]:
        """Steps before which a complete checkpoint was saved."""
        return anchor_steps(self.storage)

    def anchor(self, step: int) -> Path:
        """Return the checkpoint's folder on this machine after checking the size of every file.

        `verify` checks the bytes.

        Raises:
            StepNotRecorded: there is no checkpoint before this step.
            DamagedRecord: a file is missing or has another size.
        """
        if step not in self.anchors():
            raise StepNotRecorded(f"{self.path} has no anchor at step {step}: it has {list(self.anchors())}")
        folder = f"{ANCHORS_FOLDER}/{step_name(step)}"
        manifest = parse_anchor(
            read_checksummed(self.storage, f"{folder}/{ANCHOR_FILE}"), f"{folder}/{ANCHOR_FILE}"
        )
        for name, entry in manifest.files.items():
            if self.storage.size(f"{folder}/{name}") != entry.size_bytes:
                raise DamagedRecord(f"{folder}/{name}", "is missing or has another size")
        return self.storage.local_folder(folder)


def checked_file(storage: Storage, file: str, entry: FileEntry) -> bytes:
    """Read a file that has one checksum. Raises DamagedRecord unless its bytes match."""
    data = bytes(storage.read(file, 0, entry.size_bytes + 1))
    check_file(storage, file, entry, [data])
    return data


def check_file(storage: Storage, file: str, entry: FileEntry, blocks: Iterable[bytes | bytearray]) -> None:
    """Raise DamagedRecord unless a file, whose bytes are in `blocks`, has its size and checksum."""
    check_size(storage, file, entry.size_bytes)
    crc = 0
    for block in blocks:
        crc = crc32c(block, crc)
    if f"{crc:08x}" != entry.crc32c:
        raise DamagedRecord(file, f"bytes do not match their crc32c {entry.crc32c}")


def read_checksummed(storage: Storage, file: str) -> dict[str, Any]:
    """Read a checksummed JSON file. Raises DamagedRecord if it is absent or any byte differs."""
    return parse_checksummed(read_small(storage, file), file)


def read_small(storage: Storage, file: str) -> bytes:
    """Read a file that JSON fits into. Raises DamagedRecord if it is absent or larger."""
    data = bytes(storage.read(file, 0, MAX_JSON_BYTES + 1))
    if not data and storage.size(file) is None:
        raise DamagedRecord(file, "is missing")
    if len(data) > MAX_JSON_BYTES:
        raise DamagedRecord(file, f"has more than {MAX_JSON_BYTES} bytes")
    return data


def read_manifest(storage: Storage, step: int) -> StepManifest:
    """Read the step.json of a step. Raises DamagedRecord if absent, changed, or of another step."""
    return parse_manifest(read_small(storage, step_file(step)), step)


def step_file(step: int) -> str:
    return f"{STEPS_FOLDER}/{step_name(step)}/{STEP_FILE}"


def parse_manifest(data: bytes, step: int) -> StepManifest:
    """Parse the bytes of the step.json of a step. Raises DamagedRecord."""
    file = step_file(step)
    manifest = parse_step(parse_checksummed(data, file), file)
    if manifest.step != step:
        raise DamagedRecord(file, f"belongs to step {manifest.step}: a folder was renamed")
    return manifest


def read_gaps(storage: Storage) -> Gaps:
    """Read gaps.json; no gaps if the file is absent. Raises DamagedRecord."""
    return Gaps() if is_absent(storage, GAPS_FILE) else parse_gaps(read_checksummed(storage, GAPS_FILE))


def read_end(storage: Storage) -> EndMark | None:
    """Read end.json; None if the run was interrupted, or still records. Raises DamagedRecord."""
    return None if is_absent(storage, END_FILE) else parse_end(read_checksummed(storage, END_FILE))


def is_absent(storage: Storage, file: str) -> bool:
    """Return whether there is no such file at the top. Raises DamagedRecord for a folder."""
    if storage.size(file) is not None:
        return False
    if file in storage.names(""):
        raise DamagedRecord(file, "is a folder, and should be a file")
    return True


def describe_steps(steps: tuple[int, ...]) -> str:
    """`no steps`, `steps 0 to 9`, or `90 steps from 0 to 99`."""
    if not steps:
        return "no steps"
    if steps[-1] - steps[0] + 1 == len(steps):
        return f"steps {steps[0]} to {steps[-1]}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def step_folders(storage: Storage, gaps: Gaps = Gaps()) -> list[int]:
    steps = numbered_folders(storage, STEPS_FOLDER)
    return [step for step in steps if not in_ranges(step, gaps.removed)] if gaps.removed else steps


def numbered_folders(storage: Storage, folder: str) -> list[int]:
    return sorted([step for step in map(step_number, storage.names(folder)) if step is not None])


def anchor_steps(storage: Storage) -> tuple[int, ...]:
    steps = numbered_folders(storage, ANCHORS_FOLDER)
    files = {step: f"{ANCHORS_FOLDER}/{step_name(step)}/{ANCHOR_FILE}" for step in steps}
    return tuple(step for step, file in files.items() if storage.size(file) is not None)


def top_files(storage: Storage) -> list[str]:
    return [name for name in TOP_FILES if storage.size(name) is not None]


ZIP_BEGIN = b"PK\x03\x04"


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """Open the storage at a folder, a zip file or an fsspec URL.

    Raises RecordNotFound if nothing exists there, and NotARecord for a file or store that is not an
    archive.
    """
    location = location_of(path)
    local = Path(location)
    if not is_url(location):
        if not local.exists():
            raise RecordNotFound(f"{location} does not exist: give the folder that a run recorded into")
        if local.is_dir() and not (local / "zarr.json").is_file():
            if any((local / group / "zarr.json").is_file() for group in ("all", STEPS_FOLDER)):
                raise DamagedRecord("zarr.json", "is missing: the folder holds the rest of an archive")
            return FolderStorage(local)
        if local.is_file() and not zipfile.is_zipfile(local):
            with open_received(local) as file:
                if file.read(len(ZIP_BEGIN)) == ZIP_BEGIN:
                    size_bytes = local.stat().st_size
                    raise DamagedRecord(local.name, f"is a zip file that is cut off after {size_bytes} bytes")
            raise RecordNotFound(f"{location} is a file: give the folder that a run recorded into")
    from recorder.archive_storage import open_archive  # zarr takes 0.2 s to import

    return open_archive(location)


def not_a_record(location: str | os.PathLike[str], storage: Storage) -> NotARecord:
    """Return the error for a folder without record.json, with records that are directly below it."""
    found = (name for name in sorted(storage.names("")) if storage.size(f"{name}/{RECORD_FILE}") is not None)
    below = ", ".join(os.path.join(location, name) for name in islice(found, 3))
    give = f"give one of those below it: {below}" if below else "give the folder that a run recorded into"
    return NotARecord(f"{location} holds no {RECORD_FILE}: {give}")


def open_record(path: str | os.PathLike[str], damage: Damage | None = None) -> Record:
    """Open a record: a folder, or an archive in a folder, a zip file or at an fsspec URL.

    Costs one listing for any number of steps: steps commit in order, so only the last ones can lack
    step.json; a step that lost it later, which the end mark shows of the last ones, is damaged:
    that is reported when it is read.

    Args:
        path: folder, zip file or URL. Archives need the extra `archive`.
        damage: gets what is wrong with gaps.json or end.json, without which a record can be read.

    Raises:
        RecordNotFound: nothing exists there, or it is a file and no archive.
        NotARecord: it has no record.json.
        UnknownFormat: a newer version wrote it.
        DamagedRecord: record.json is damaged; gaps.json too, unless `damage` is given.
    """
    location, storage = location_of(path), open_storage(path)
    if storage.size(RECORD_FILE) is None:
        # A run that was killed at its start may have started a step, and committed none.
        committed_any = any(storage.size(step_file(step)) is not None for step in step_folders(storage))
        if committed_any or RECORD_FILE in storage.names(""):
            raise DamagedRecord(RECORD_FILE, "is missing: without it the steps have no meaning")
        raise not_a_record(location, storage)
    header = parse_header(read_checksummed(storage, RECORD_FILE))
    gaps, end = Gaps(), None
    with damage.left_out() if damage else nullcontext():
        gaps = read_gaps(storage)
    steps = step_folders(storage, gaps)
    committed = len(steps)
    while committed and storage.size(step_file(steps[committed - 1])) is None:
        committed -= 1
    if damage or committed < len(steps):
        with (damage or Damage()).left_out():
            end = read_end(storage)
    if end is not None and end.last is not None:
        committed = max(committed, bisect_right(steps, end.last.step))
    return Record(location, storage, header, tuple(steps[:committed]), tuple(steps[committed:]), gaps)


@dataclass(frozen=True)
class StepSummary:
    """A step over all ranks. `mean_reward` is over known rewards, None if there are none.

    `num_unknown` are the rows whose value under a key is not known, by key, without zeros.
    """

    step: int
    version: int
    num_rows: int
    num_tokens: int
    size_bytes: int
    mean_reward: float | None
    num_unknown: dict[str, int] = field(default_factory=dict)


def summarise_steps(
    record: Record, tick: Callable[[object], None], damage: Damage | None = None
) -> list[StepSummary]:
    """Summarise each committed step; calls `tick(step)` after each.

    A step of which a file is damaged or missing goes into `damage`, or raises DamagedRecord.
    """
    summaries = []
    for number in record.steps:
        with damage.left_out() if damage else nullcontext():
            summaries.append(summary_of(record.step(number)))
        tick(number)
    return summaries


def summary_of(step: RecordedStep) -> StepSummary:
    batches = [step.batch_entry(rank)[1] for rank in step.ranks]
    return StepSummary(
        step=step.manifest.step,
        version=step.manifest.version,
        num_rows=sum(batch.num_rows for batch in batches),
        num_tokens=sum(batch.num_tokens for batch in batches),
        size_bytes=step.manifest.size_bytes,
        mean_reward=mean_reward(step),
        num_unknown=step.num_unknown(),
    )


def mean_reward(step: RecordedStep) -> float | None:
    """Return the mean of the rewards of a step that are known; None if none is."""
    known = [step.batch(rank, ["rewards"])["rewards"][step.known(rank, "rewards")] for rank in step.ranks]
    rewards = [reward for of_rank in known for reward in of_rank.tolist()]
    return sum(rewards) / len(rewards) if rewards else None
