"""Names, dataclasses and parsers of the record format, which FORMAT.md specifies."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, TypedDict

import numpy as np

from areal_core.safety.printable import printable
from recorder.documents import (
    Checksum,
    Count,
    Digest,
    FileName,
    HexFloat,
    Positive,
    Step,
    integer,
    mismatch,
    one_of,
    parse_as,
    parser_of,
)
from recorder.errors import DamagedRecord, UnknownFormat

FORMAT_VERSION = 2
PICTURES_VERSION = 3  # of a step.json whose batches have pictures
READABLE_VERSIONS = (1, 2)
READABLE_STEPS = (*READABLE_VERSIONS, PICTURES_VERSION)
RECORD_FILE = "record.json"
STEP_FILE = "step.json"
ANCHOR_FILE = "anchor.json"
GAPS_FILE = "gaps.json"
END_FILE = "end.json"
SIGNATURE_FILES = ("signed.json.sig", "signed.json")  # of versions that signed records; not read
# record.json is last: what removes a record removes these in order, and without it none is left
TOP_FILES = (*SIGNATURE_FILES, END_FILE, GAPS_FILE, RECORD_FILE)
# temporary files of a killed process; they can be ignored
UNFINISHED_FILES = frozenset(f"{name}.tmp" for name in TOP_FILES)
# held by the writer; of a dead one it means nothing. Files LOCK_FILE.* are of writers that take it.
LOCK_FILE = "writer.lock"
STEPS_FOLDER = "steps"
ANCHORS_FOLDER = "anchors"
IMAGES_FOLDER = "images"  # pictures of all steps, named by the sha256 of their bytes
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
FLOATS = frozenset({"F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64"})
INTEGERS = NUMPY_TYPES.keys() - FLOATS - {"BOOL"}

# what every batch has, "float" or "int", and the axis; readers rely on both
BATCH_KEYS = {
    "cu_seqlens": ("int", "offset"),
    "input_ids": ("int", "token"),
    "loss_mask": ("int", "token"),
    "logprobs": ("float", "token"),
    "versions": ("int", "token"),
    "rewards": ("float", "row"),
    "prompt_id": ("int", "row"),
    "sample_id": ("int", "row"),
    "finish_reason": ("int", "row"),
}
# what batches of agents have besides, all or none
AGENT_KEYS = dict.fromkeys(("episode", "branch", "parent_turn", "failure"), ("int", "row")) | {
    "turns": ("int", "token")
}
# what batches with pictures have, by axis; what IMAGE_FORMS lists, of each kind all or none
IMAGE_KEYS = {
    "image_count": "row",
    "image_bytes": "image",
    "image_sha256": "image",
    "image_units": "image",
    "image_grid_thw": "image",
    "pixel_values": "unit",
}
IMAGE_FORMS = (("image_bytes", "image_sha256"), ("image_units", "pixel_values"))
IMAGE_DATA = "image_data"  # bytes of all pictures of a trainer's batch, one after another
# what batches of other trainers have besides, and the bit of `unknown` for each value of a row
OTHER_TRAINER_KEYS = dict.fromkeys(("unknown", "prompt_length"), ("int", "row"))
UNKNOWN_BITS = {
    "input_ids": 1,
    "loss_mask": 2,
    "logprobs": 4,
    "versions": 8,
    "rewards": 16,
    "prompt_id": 32,
    "finish_reason": 64,
    "prompt_length": 128,
}
FILE_KINDS = {
    "batch": "safetensors",
    "learning": "safetensors",
    "plan": "json",
    "outcome": "json",
    "text": "jsonl",
    "calls": "jsonl",
}
LARGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
LARGEST_ROW = 1 << 24  # tokens
LARGEST_PICTURE = 1 << 26  # bytes
LARGEST_PICTURES = 1 << 34  # bytes of all pictures of a batch, repeated ones counted each time
# largest values of what readers look up or decode; the smallest is 0
LARGEST_VALUES = {
    "input_ids": 2**31 - 1,
    "finish_reason": 2,
    "branch": 11,
    "failure": 5,
    "prompt_length": LARGEST_ROW,
    "image_count": LARGEST_ROW,
    "image_bytes": LARGEST_PICTURE,
    "image_units": LARGEST_ROW,
}
LARGEST_SHAPE = 1 << 40  # elements, counted without the dimensions that are 0


def fingerprint(value: Any) -> dict[str, Any]:
    """Accept environments: objects with a build of torch and a commit, which may be null."""
    for group, member in (("torch", "build"), ("code", "commit")):
        found = value.get(group) if isinstance(value, dict) else None
        if not isinstance(found, dict) or not isinstance(found.get(member, 0), str | None):
            raise mismatch(f"an object in which {group}.{member} is text or null", value)
    for group, member in (("trainer", "name"), ("imported", "format")):
        found = value.get(group, {member: ""})
        if not isinstance(found, dict) or not isinstance(found.get(member), str):
            raise mismatch(f"an object in which {group}.{member} is text", value)
    return value


def step_name(step: int) -> str:
    """`000042`; more digits where they are needed."""
    return f"{step:06d}"


def step_number(name: str) -> int | None:
    """Return the step whose folder has the name; None if no folder of a record has it."""
    # the pattern would take twice as long, which matters with 10,000 steps
    six = len(name) == 6 or (6 < len(name) <= 9 and name[0] != "0")
    return int(name) if six and name.isdecimal() and name.isascii() else None


def is_lock_file(name: str) -> bool:
    return name == LOCK_FILE or name.startswith(f"{LOCK_FILE}.")


def rank_file(kind: str, rank: int, num_ranks: int, suffix: str) -> str:
    """`batch-00001-of-00004.safetensors`."""
    return f"{kind}-{rank:05d}-of-{num_ranks:05d}.{suffix}"


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of a file that has one checksum for all of its bytes."""

    size_bytes: Count
    crc32c: Checksum


class FileIdentity(TypedDict):
    """Size and checksum of a file outside the record."""

    size_bytes: Count
    crc32c: Checksum


class FolderIdentity(TypedDict):
    """A model or tokenizer: a path, and its files if it is a local folder."""

    path: str
    files: dict[FileName, FileIdentity]


@dataclass(frozen=True)
class StepLink:
    """A committed step by number and sha256 of its step.json."""

    step: Step
    sha256: Digest


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a batch file. `offset` counts from the start of the file.

    `dtype` is the trainer's dtype, `stored` that of the file (integers per token use the narrowest
    type that fits); both are safetensors names. `axis` defines the first dimension: `token`, `row`,
    `offset` for `cu_seqlens`, `image`, or `unit`, an entry of the pixels of a picture.
    """

    dtype: Annotated[str, one_of(*NUMPY_TYPES)]
    stored: Annotated[str, one_of(*NUMPY_TYPES)]
    shape: tuple[Count, ...]
    axis: Annotated[str, one_of("token", "row", "offset", "image", "unit")]
    offset: Count
    size_bytes: Count
    crc32c: Checksum


@dataclass(frozen=True)
class BatchEntry:
    """One batch file: header and tensors together cover every byte."""

    size_bytes: Count
    header_bytes: Annotated[int, integer(8, LARGEST_HEADER)]
    header_crc32c: Checksum
    num_rows: Count
    num_tokens: Count
    padded_length: Annotated[int, integer(0, LARGEST_ROW)]
    tensors: dict[str, TensorEntry]

    def length(self, axis: str) -> int:
        """Return the size of an axis; 0 if no tensor has it."""
        sizes = (entry.shape[:1] for entry in self.tensors.values() if entry.axis == axis)
        return next((size for shape in sizes for size in shape), 0)


@dataclass(frozen=True)
class Recording:
    """Which steps of a run are recorded, and how much of each.

    `scope` is "rollout" (batches and text), "plan" (also plan and outcome), "full" (also the
    trainer's inputs to the loss, per token), or "given": of another trainer, all that it gave, in
    the steps that it gave. Steps that `every` divides are recorded, or exactly those of `steps`.
    """

    scope: Annotated[str, one_of("rollout", "plan", "full", "given")] = "plan"
    every: Positive = 1
    steps: tuple[Step, ...] | None = None

    def wants(self, step: int) -> bool:
        return step % self.every == 0 if self.steps is None else step in self.steps

    @property
    def has_plans(self) -> bool:
        """Whether each step has a plan and an outcome."""
        return self.scope in ("plan", "full")


@dataclass(frozen=True)
class RankFiles:
    """The files that one rank wrote in a step: its entries of step.json."""

    batches: dict[FileName, BatchEntry]
    files: dict[FileName, FileEntry]


@dataclass(frozen=True)
class StepManifest:
    """step.json.

    `version` is the weight version after the step; `previous` the step that was committed before
    it, None for the first; `batches` describes every safetensors file. Format 1 has no `previous`.
    """

    format_version: int
    step: Step
    version: Count
    num_ranks: Positive
    previous: StepLink | None
    batches: dict[FileName, BatchEntry]
    files: dict[FileName, FileEntry]

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
    world_size: Positive
    num_ranks: Positive
    allocation: str | None
    model: Annotated[dict[str, Any], parser_of(FolderIdentity)]
    tokenizer: Annotated[dict[str, Any], parser_of(FolderIdentity)] | None
    environment: Annotated[dict[str, Any], fingerprint]
    config: dict[str, Any]
    recording: Recording = field(default_factory=Recording)

    @property
    def trainer(self) -> str | None:
        """Name of the trainer, or of the format of an import; None for that of this repository."""
        made_by, imported = (self.environment.get(name) for name in ("trainer", "imported"))
        return made_by["name"] if made_by else imported["format"] if imported else None

    @property
    def method(self) -> str | None:
        """The supervised method of this repository, "sft", "dpo" or "rw"; None for any other."""
        return self.environment.get("method")

    @property
    def lacks_images(self) -> bool:
        """Whether this is a copy without the pictures that its rows had."""
        return "without_images" in self.environment

    @property
    def config_is_ours(self) -> bool:
        """Whether the config has options of this repository: an import is given them, or none."""
        return self.trainer is None or (bool(self.config) and "imported" in self.environment)


@dataclass(frozen=True)
class AnchorManifest:
    """anchor.json: the files of a checkpoint taken before `step`."""

    format_version: int
    step: Step
    files: dict[FileName, FileEntry]


@dataclass(frozen=True)
class EndMark:
    """end.json: the run has ended, with an error unless `finished`, and `last` is its last step."""

    format_version: int
    finished: bool
    last: StepLink | None


@dataclass(frozen=True)
class Plan:
    """A rank's inputs to a step: weight version and RNG states at its start, the trainer's plan."""

    step: Step
    version: Count
    rng: dict[str, str]
    details: dict[str, Any]


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of one rank.

    `rows` are positions in the rank's batch, `weight` is the loss denominator.
    """

    minibatch: Count
    micro_batch: Count
    rows: tuple[Count, ...]
    num_tokens: Count
    loss: HexFloat
    weight: HexFloat


@dataclass(frozen=True)
class Minibatch:
    """Checksums of an optimizer step by parameter: gradients before clipping, weights after."""

    gradients: dict[str, Checksum]
    weights: dict[str, Checksum]


@dataclass(frozen=True)
class Outcome:
    """Results of a step on one rank.

    `version` is the one after the step; `checksums` are by parameter.

    `minibatches` is empty unless the scope of the record is "full".
    """

    step: Step
    version: Count
    micro_batches: tuple[MicroBatch, ...]
    stats: dict[str, HexFloat]
    checksums: dict[str, Checksum]
    minibatches: tuple[Minibatch, ...] = ()


class TextLine(TypedDict):
    """A row of text-*.jsonl."""

    row: Count
    prompt: str
    completion: str
    reward: float | None


def check_version(document: dict[str, Any], file: str, readable: tuple[int, ...] = READABLE_VERSIONS) -> int:
    """Return the format version. Raises UnknownFormat unless this code reads it."""
    found = document.get("format_version")
    if type(found) is not int or found not in readable:
        *others, last = map(str, readable)
        raise UnknownFormat(
            f"{file} has format version {printable(repr(found), 20)}, this version of areal-debug reads "
            f"{', '.join(others)} and {last}: install the version that wrote it"
        )
    return found


def parse_header(document: dict[str, Any]) -> RecordHeader:
    """Parse record.json, whose checksum has been checked and removed."""
    check_version(document, RECORD_FILE)
    return parse_as(RecordHeader, document, RECORD_FILE)


def parse_end(document: dict[str, Any]) -> EndMark:
    """Parse end.json, whose checksum has been checked and removed."""
    check_version(document, END_FILE)
    return parse_as(EndMark, document, END_FILE)


def parse_step(document: dict[str, Any], file: str) -> StepManifest:
    """Parse step.json; `file` is its name in errors."""
    if check_version(document, file, READABLE_STEPS) == 1:
        document = {"previous": None} | document
    manifest = parse_as(StepManifest, document, file)
    check_ranks(manifest, file)
    if manifest.format_version != PICTURES_VERSION and has_pictures(manifest.batches.values()):
        raise DamagedRecord(file, f"has pictures, and format version {manifest.format_version}")
    for name, batch in manifest.batches.items():
        if reason := problem_of_batch(batch, BATCH_KEYS if name.startswith("batch-") else {}):
            raise DamagedRecord(file, f"describes {name} with {reason}")
    return manifest


def has_pictures(batches: Iterable[BatchEntry]) -> bool:
    return any(IMAGE_KEYS.keys() & batch.tensors.keys() for batch in batches)


def check_ranks(manifest: StepManifest, file: str) -> None:
    """Raise DamagedRecord unless the files are those of the ranks, each with a batch."""
    names = [*manifest.batches, *manifest.files]
    batches = [name for name in manifest.batches if name.startswith("batch-")]
    if len(batches) != manifest.num_ranks:
        raise DamagedRecord(file, f"lists {len(batches)} batches of {manifest.num_ranks} ranks")
    kinds = files_of_ranks(len(batches))  # of what it lists: its number of ranks is not bounded
    for name in names:
        if (kinds.get(name) == "safetensors") != (name in manifest.batches) or name not in kinds:
            raise DamagedRecord(file, f"lists {printable(name, 60)}, which no rank writes")


@lru_cache(maxsize=2)
def files_of_ranks(num_ranks: int) -> dict[str, str]:
    """Return the suffix of each file that a step of these ranks may have, by name."""
    return {
        rank_file(kind, rank, num_ranks, suffix): suffix
        for rank in range(num_ranks)
        for kind, suffix in FILE_KINDS.items()
    }


def problem_of_batch(batch: BatchEntry, keys: Mapping[str, tuple[str, str]]) -> str | None:
    """Return why the entry of a batch file contradicts itself, or None.

    Header and tensors cover the file without overlap or hole, and a tensor has as many bytes as its
    shape needs: what a reader allocates is bounded by the size of the file.
    """
    end = batch.header_bytes
    for name, tensor in sorted(batch.tensors.items(), key=lambda item: (item[1].offset, item[1].size_bytes)):
        if reason := problem_of_tensor(batch, tensor) or problem_of_key(tensor, keys.get(name)):
            return f"tensor {printable(name, 60)}, which {reason}"
        if tensor.offset != end:
            return f"tensor {printable(name, 60)} at byte {tensor.offset}, {end} expected"
        end += tensor.size_bytes
    if missing := sorted({*keys, "cu_seqlens"} - set(batch.tensors)):
        return f"no tensor {missing[0]}"
    for whose, group in (("agents", AGENT_KEYS), ("other trainers", OTHER_TRAINER_KEYS)):
        if found := group.keys() & batch.tensors.keys():
            if absent := sorted(group.keys() - found):
                return f"tensor {min(found)}, but no {absent[0]}"
            wrong = (problem_of_key(batch.tensors[name], group[name]) for name in sorted(found))
            if reason := next(filter(None, wrong), None):
                return f"a tensor of {whose} that {reason}"
    if reason := problem_of_pictures(batch):
        return reason
    if end != batch.size_bytes:
        return f"{end} bytes of header and tensors in {batch.size_bytes} bytes"
    if batch.num_tokens > batch.num_rows * batch.padded_length:
        return f"{batch.num_tokens} tokens in {batch.num_rows} rows of at most {batch.padded_length}"
    return None


def problem_of_tensor(batch: BatchEntry, tensor: TensorEntry) -> str | None:
    lengths = {"token": batch.num_tokens, "row": batch.num_rows, "offset": batch.num_rows + 1}
    length = lengths[tensor.axis] if tensor.axis in lengths else batch.length(tensor.axis)
    if tensor.shape[:1] != (length,):
        return f"has shape {list(tensor.shape)[:8]} along axis {tensor.axis}, {length} expected"
    if len(tensor.shape) > 8 or math.prod([size or 1 for size in tensor.shape]) > LARGEST_SHAPE:
        return "has a shape beyond every limit"
    if math.prod(tensor.shape) * NUMPY_TYPES[tensor.stored].itemsize != tensor.size_bytes:
        return f"has {tensor.size_bytes} bytes, which is not its shape in {tensor.stored}"
    if tensor.stored != tensor.dtype and not {tensor.stored, tensor.dtype} <= INTEGERS:
        return f"is stored as {tensor.stored} and read as {tensor.dtype}"
    return None


def problem_of_pictures(batch: BatchEntry) -> str | None:
    found = {name: tensor for name, tensor in batch.tensors.items() if tensor.axis in ("image", "unit")}
    found |= {name: batch.tensors[name] for name in IMAGE_KEYS.keys() & batch.tensors.keys()}
    for name, tensor in found.items():
        if tensor.axis != IMAGE_KEYS.get(name):
            return f"tensor {printable(name, 60)} along axis {tensor.axis}"
        if name in LARGEST_VALUES and (tensor.dtype not in INTEGERS or len(tensor.shape) != 1):
            return f"tensor {name} that is {tensor.dtype} {list(tensor.shape)}"
    if found and "image_count" not in found:
        return f"tensor {min(found)}, but no image_count"
    for form in IMAGE_FORMS:
        if found.keys() & set(form) not in (set(), set(form)):
            return f"tensor {min(found.keys() & set(form))}, but not all of {' and '.join(form)}"
    digests = found.get("image_sha256")
    if digests is not None and (digests.stored, digests.dtype, digests.shape[1:]) != ("U8", "U8", (32,)):
        return f"tensor image_sha256 that is {digests.dtype} {list(digests.shape)}"
    return None


def problem_of_key(tensor: TensorEntry, expected: tuple[str, str] | None) -> str | None:
    """Return why a tensor is not what every batch has under its key, or None."""
    found = ("float" if tensor.dtype in FLOATS else "int", tensor.axis)
    if expected is not None and (found != expected or len(tensor.shape) != 1):
        return f"is {tensor.dtype} {list(tensor.shape)} along axis {tensor.axis}"
    return None


def parse_anchor(document: dict[str, Any], file: str) -> AnchorManifest:
    """Parse anchor.json; `file` is its name in errors."""
    check_version(document, file)
    return parse_as(AnchorManifest, document, file)


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """Serialize an outcome as JSON types, floats as C99 hex: equal text means equal bits.

    `parse_as` is the inverse.
    """
    micro_batches = [
        vars(m) | {"loss": m.loss.hex(), "weight": m.weight.hex()} for m in outcome.micro_batches
    ]
    stats = {name: value.hex() for name, value in outcome.stats.items()}
    return vars(outcome) | {"micro_batches": micro_batches, "stats": stats}


def parse_text_line(document: dict[str, Any], file: str) -> dict[str, Any]:
    return dict(parse_as(TextLine, document, file))
