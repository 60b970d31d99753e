"""Names, dataclasses and parsers of the record format, which FORMAT.md specifies."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from recorder.errors import DamagedRecord, UnknownFormat

FORMAT_VERSION = 1
RECORD_FILE = "record.json"
STEP_FILE = "step.json"
ANCHOR_FILE = "anchor.json"
GAPS_FILE = "gaps.json"
# temporary files of a killed process; they can be ignored
UNFINISHED_FILES = frozenset({f"{RECORD_FILE}.tmp", f"{GAPS_FILE}.tmp"})
STEPS_FOLDER = "steps"
ANCHORS_FOLDER = "anchors"
STEP_NAME = re.compile(r"\d{6,}")
# safetensors dtype -> NumPy dtype of the stored bytes, little-endian. NumPy has no bfloat16 and no
# 8-bit floats: their bits are kept in unsigned integers.
NUMPY_TYPES = {
    "BOOL": np.dtype("bool"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}

T = TypeVar("T")


def step_name(step: int) -> str:
    """`000042`; more digits where they are needed."""
    return f"{step:06d}"


def rank_file(kind: str, rank: int, num_ranks: int, suffix: str) -> str:
    """`batch-00001-of-00004.safetensors`."""
    return f"{kind}-{rank:05d}-of-{num_ranks:05d}.{suffix}"


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of a file that has one checksum for all of its bytes."""

    size_bytes: int
    crc32c: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a batch file. `offset` counts from the start of the file.

    `dtype` is the trainer's dtype, `stored` that of the file (integers per token use the narrowest
    type that fits); both are safetensors names. `axis` defines the first dimension: `token`, `row`,
    or `offset` for `cu_seqlens`.
    """

    dtype: str
    stored: str
    shape: tuple[int, ...]
    axis: str
    offset: int
    size_bytes: int
    crc32c: str


@dataclass(frozen=True)
class BatchEntry:
    """One batch file: header and tensors together cover every byte."""

    size_bytes: int
    header_bytes: int
    header_crc32c: str
    num_rows: int
    num_tokens: int
    padded_length: int
    tensors: dict[str, TensorEntry]


@dataclass(frozen=True)
class Recording:
    """Which steps of a run are recorded, and how much of each.

    `scope` is "rollout" (batches and text), "plan" (also plan and outcome) or "full" (also the
    trainer's inputs to the loss, per token). Steps that `every` divides are recorded, or exactly
    those of `steps`.
    """

    scope: str = "plan"
    every: int = 1
    steps: tuple[int, ...] | None = None

    def wants(self, step: int) -> bool:
        """Return whether the step is to be recorded."""
        return step % self.every == 0 if self.steps is None else step in self.steps


@dataclass(frozen=True)
class RankFiles:
    """The files that one rank wrote in a step: its entries of step.json."""

    batches: dict[str, BatchEntry]
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class StepManifest:
    """step.json.

    `version` is the weight version after the step; `batches` describes every safetensors file.
    """

    format_version: int
    step: int
    version: int
    num_ranks: int
    batches: dict[str, BatchEntry]
    files: dict[str, FileEntry]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files of the step but step.json."""
        batches, files = self.batches.values(), self.files.values()
        return sum(entry.size_bytes for entry in batches) + sum(entry.size_bytes for entry in files)


@dataclass(frozen=True)
class RecordHeader:
    """record.json. `environment`, `model` and `tokenizer` are those of `recorder.environment`."""

    format_version: int
    created: str
    world_size: int
    num_ranks: int
    allocation: str | None
    model: dict[str, Any]
    tokenizer: dict[str, Any] | None
    environment: dict[str, Any]
    config: dict[str, Any]
    recording: Recording = field(default_factory=Recording)


@dataclass(frozen=True)
class AnchorManifest:
    """anchor.json: the files of a checkpoint taken before `step`."""

    format_version: int
    step: int
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Plan:
    """A rank's inputs to a step: weight version and RNG states at its start, the trainer's plan."""

    step: int
    version: int
    rng: dict[str, str]
    details: dict[str, Any]


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of one rank.

    `rows` are positions in the rank's batch, `weight` is the loss denominator.
    """

    minibatch: int
    micro_batch: int
    rows: tuple[int, ...]
    num_tokens: int
    loss: float
    weight: float


@dataclass(frozen=True)
class Minibatch:
    """Checksums of an optimizer step by parameter: gradients before clipping, weights after."""

    gradients: dict[str, str]
    weights: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """Results of a step on one rank.

    `version` is the one after the step; `checksums` are by parameter.

    `minibatches` is empty unless the scope of the record is "full".
    """

    step: int
    version: int
    micro_batches: tuple[MicroBatch, ...]
    stats: dict[str, float]
    checksums: dict[str, str]
    minibatches: tuple[Minibatch, ...] = ()


def fields_of(cls: type[T], document: Any, file: str) -> dict[str, Any]:
    """Return the document's members, which must be exactly the fields of `cls`.

    Raises DamagedRecord for a missing one and UnknownFormat for one that this version does not
    know.
    """
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if not isinstance(document, dict) or names - set(document):
        raise DamagedRecord(file, f"lacks {sorted(names - set(document or ()))}")
    if unknown := sorted(set(document) - names):
        raise UnknownFormat(
            f"{file} has unknown keys {unknown}: install the version of areal-debug that wrote it"
        )
    return document


def check_version(document: dict[str, Any], file: str) -> None:
    """Raise UnknownFormat unless the document has the version that this code reads."""
    found = document.get("format_version")
    if found != FORMAT_VERSION:
        raise UnknownFormat(
            f"{file} has format version {found}, this version of areal-debug reads {FORMAT_VERSION}: "
            "install the version that wrote it"
        )


def parse_header(document: dict[str, Any]) -> RecordHeader:
    """Parse record.json, whose checksum has been checked and removed."""
    check_version(document, RECORD_FILE)
    members = fields_of(RecordHeader, document, RECORD_FILE)
    recording = fields_of(Recording, members["recording"], RECORD_FILE)
    steps = None if recording["steps"] is None else tuple(recording["steps"])
    return RecordHeader(**members | {"recording": Recording(**recording | {"steps": steps})})


def parse_files(document: dict[str, Any], file: str) -> dict[str, FileEntry]:
    """Parse the `files` member of step.json or anchor.json."""
    return {name: FileEntry(**fields_of(FileEntry, entry, file)) for name, entry in document.items()}


def parse_tensor(document: dict[str, Any], file: str) -> TensorEntry:
    """Parse one member of `tensors` in step.json."""
    members = fields_of(TensorEntry, document, file)
    return TensorEntry(**{**members, "shape": tuple(members["shape"])})


def parse_batches(document: dict[str, Any], file: str) -> dict[str, BatchEntry]:
    """Parse the `batches` member of step.json."""
    batches = {}
    for name, entry in document.items():
        members = fields_of(BatchEntry, entry, file)
        tensors = {key: parse_tensor(item, file) for key, item in members["tensors"].items()}
        batches[name] = BatchEntry(**{**members, "tensors": tensors})
    return batches


def parse_rank_files(document: dict[str, Any], file: str) -> RankFiles:
    """Parse manifest-*.json, which exists until the step is committed."""
    members = fields_of(RankFiles, document, file)
    return RankFiles(parse_batches(members["batches"], file), parse_files(members["files"], file))


def parse_step(document: dict[str, Any], file: str) -> StepManifest:
    """Parse step.json; `file` is its name in errors."""
    check_version(document, file)
    members = fields_of(StepManifest, document, file)
    parsed = {
        "batches": parse_batches(members["batches"], file),
        "files": parse_files(members["files"], file),
    }
    return StepManifest(**{**members, **parsed})


def parse_anchor(document: dict[str, Any], file: str) -> AnchorManifest:
    """Parse anchor.json; `file` is its name in errors."""
    check_version(document, file)
    members = fields_of(AnchorManifest, document, file)
    return AnchorManifest(**{**members, "files": parse_files(members["files"], file)})


def parse_plan(document: dict[str, Any], file: str) -> Plan:
    """Parse plan-*.json."""
    return Plan(**fields_of(Plan, document, file))


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """Serialize an outcome as JSON types, floats as C99 hex: equal text means equal bits."""
    micro_batches = [
        vars(m) | {"loss": m.loss.hex(), "weight": m.weight.hex()} for m in outcome.micro_batches
    ]
    stats = {name: value.hex() for name, value in outcome.stats.items()}
    return vars(outcome) | {"micro_batches": micro_batches, "stats": stats}


def parse_outcome(document: dict[str, Any], file: str) -> Outcome:
    """Parse outcome-*.json; the inverse of `outcome_document`."""
    members = fields_of(Outcome, document, file)
    micro_batches = [fields_of(MicroBatch, item, file) for item in members["micro_batches"]]
    numbers = [
        {
            **item,
            "rows": tuple(item["rows"]),
            "loss": float.fromhex(item["loss"]),
            "weight": float.fromhex(item["weight"]),
        }
        for item in micro_batches
    ]
    return Outcome(
        step=members["step"],
        version=members["version"],
        micro_batches=tuple(MicroBatch(**item) for item in numbers),
        stats={name: float.fromhex(value) for name, value in members["stats"].items()},
        checksums=members["checksums"],
        minibatches=tuple(Minibatch(**fields_of(Minibatch, item, file)) for item in members["minibatches"]),
    )
