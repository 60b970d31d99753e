"""The names, the dataclasses and the parse functions of the format. FORMAT.md says it in words."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

from recorder.errors import DamagedRecord, UnknownFormat

FORMAT_VERSION = 1
RECORD_FILE = "record.json"
STEP_FILE = "step.json"
ANCHOR_FILE = "anchor.json"
GAPS_FILE = "gaps.json"
# what a process that was killed leaves of one of them; nothing is lost with it
UNFINISHED_FILES = frozenset({f"{RECORD_FILE}.tmp", f"{GAPS_FILE}.tmp"})
STEPS_FOLDER = "steps"
ANCHORS_FOLDER = "anchors"
SCOPES = ("rollout", "plan", "full")
STEP_NAME = re.compile(r"\d{6,}")

T = TypeVar("T")


def step_name(step: int) -> str:
    """`000042`; more digits where they are needed."""
    return f"{step:06d}"


def rank_file(kind: str, rank: int, num_ranks: int, suffix: str) -> str:
    """`batch-00001-of-00004.safetensors`."""
    return f"{kind}-{rank:05d}-of-{num_ranks:05d}.{suffix}"


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of a file whose bytes are checked as a whole."""

    size_bytes: int
    crc32c: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a batch file. `offset` counts from the start of the file.

    `dtype` is what the trainer saw, `stored` what the file holds (integers per token take the narrowest type that holds
    them); both are safetensors names. `axis` says what the first dimension counts: `token`, `row`, or `offset` for `cu_seqlens`.
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
    """One batch file: its header and tensors cover every byte between them."""

    size_bytes: int
    header_bytes: int
    header_crc32c: str
    num_rows: int
    num_tokens: int
    padded_length: int
    tensors: dict[str, TensorEntry]


@dataclass(frozen=True)
class Recording:
    """What of a run is recorded.

    `scope` is "rollout" (batches and text), "plan" (also plan and outcome) or "full" (also what the trainer learned from, token by
    token). Steps that `every` divides are recorded, or exactly those of `steps`.
    """

    scope: str = "plan"
    every: int = 1
    steps: tuple[int, ...] | None = None

    def wants(self, step: int) -> bool:
        """Whether the step is to be recorded."""
        return step % self.every == 0 if self.steps is None else step in self.steps


@dataclass(frozen=True)
class RankFiles:
    """What one rank wrote in a step: its part of step.json."""

    batches: dict[str, BatchEntry]
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class StepManifest:
    """step.json. `version` is the weight version after the step; `batches` describes every safetensors file."""

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
    """What a rank set out to do: weight version and RNG states at the start of the step, and the trainer's own plan."""

    step: int
    version: int
    rng: dict[str, str]
    details: dict[str, Any]


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward of one rank. `rows` are positions in the rank's batch, `weight` is the loss denominator."""

    minibatch: int
    micro_batch: int
    rows: tuple[int, ...]
    num_tokens: int
    loss: float
    weight: float


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step, by the checksum of each parameter: its gradient before it is clipped, its weights afterwards."""

    gradients: dict[str, str]
    weights: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """What came out of a step on one rank. `version` is the one after the step; `checksums` name each parameter's.

    `minibatches` are those of a record of scope "full", and none in others.
    """

    step: int
    version: int
    micro_batches: tuple[MicroBatch, ...]
    stats: dict[str, float]
    checksums: dict[str, str]
    minibatches: tuple[Minibatch, ...] = ()


def fields_of(cls: type[T], document: Any, file: str) -> dict[str, Any]:
    """The document's members, which must be exactly the fields of `cls`.

    Raises DamagedRecord for a missing one and UnknownFormat for one that this version does not know.
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
    """Raises UnknownFormat unless the document has the version that this code reads."""
    found = document.get("format_version")
    if found != FORMAT_VERSION:
        raise UnknownFormat(
            f"{file} has format version {found}, this version of areal-debug reads {FORMAT_VERSION}: "
            "install the version that wrote it"
        )


def parse_header(document: dict[str, Any]) -> RecordHeader:
    """record.json, unsealed."""
    check_version(document, RECORD_FILE)
    members = fields_of(RecordHeader, document, RECORD_FILE)
    recording = fields_of(Recording, members["recording"], RECORD_FILE)
    steps = None if recording["steps"] is None else tuple(recording["steps"])
    return RecordHeader(**members | {"recording": Recording(**recording | {"steps": steps})})


def parse_files(document: dict[str, Any], file: str) -> dict[str, FileEntry]:
    """The `files` member of step.json or anchor.json."""
    return {name: FileEntry(**fields_of(FileEntry, entry, file)) for name, entry in document.items()}


def parse_tensor(document: dict[str, Any], file: str) -> TensorEntry:
    """One member of `tensors` in step.json."""
    members = fields_of(TensorEntry, document, file)
    return TensorEntry(**{**members, "shape": tuple(members["shape"])})


def parse_batches(document: dict[str, Any], file: str) -> dict[str, BatchEntry]:
    """The `batches` member of step.json."""
    batches = {}
    for name, entry in document.items():
        members = fields_of(BatchEntry, entry, file)
        tensors = {key: parse_tensor(item, file) for key, item in members["tensors"].items()}
        batches[name] = BatchEntry(**{**members, "tensors": tensors})
    return batches


def parse_rank_files(document: dict[str, Any], file: str) -> RankFiles:
    """manifest-*.json, unsealed, which lives until the step is committed."""
    members = fields_of(RankFiles, document, file)
    return RankFiles(parse_batches(members["batches"], file), parse_files(members["files"], file))


def parse_step(document: dict[str, Any], file: str) -> StepManifest:
    """step.json, unsealed; `file` is its name in errors."""
    check_version(document, file)
    members = fields_of(StepManifest, document, file)
    parsed = {
        "batches": parse_batches(members["batches"], file),
        "files": parse_files(members["files"], file),
    }
    return StepManifest(**{**members, **parsed})


def parse_anchor(document: dict[str, Any], file: str) -> AnchorManifest:
    """anchor.json, unsealed; `file` is its name in errors."""
    check_version(document, file)
    members = fields_of(AnchorManifest, document, file)
    return AnchorManifest(**{**members, "files": parse_files(members["files"], file)})


def parse_plan(document: dict[str, Any], file: str) -> Plan:
    """plan-*.json."""
    return Plan(**fields_of(Plan, document, file))


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """The outcome as JSON, every float as C99 hex, so that equal text means equal bits."""
    micro_batches = [
        vars(m) | {"loss": m.loss.hex(), "weight": m.weight.hex()} for m in outcome.micro_batches
    ]
    stats = {name: value.hex() for name, value in outcome.stats.items()}
    return vars(outcome) | {"micro_batches": micro_batches, "stats": stats}


def parse_outcome(document: dict[str, Any], file: str) -> Outcome:
    """outcome-*.json; the inverse of `outcome_document`."""
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
