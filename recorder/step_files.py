"""The files of one step: each rank writes its own, rank 0 commits them with checksums.

    rank r   batch, plan, outcome ─ fsync ─> manifest-r (renamed into place)
    rank 0   batch, plan, outcome ─ fsync ─> waits for the manifests ─> step.json (renamed into place)

Ranks share nothing but the folder. A rank that failed leaves no manifest: rank 0's wait for it has
to be ended (`wait_or_stop`).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.safety.durable import commit_file, sync, write_durably
from recorder.documents import (
    checksum,
    checksummed_bytes,
    json_bytes,
    json_text,
    parse_as,
    parse_checksummed,
)
from recorder.environment import file_identity
from recorder.errors import RecordError
from recorder.format import (
    ANCHOR_FILE,
    FORMAT_VERSION,
    PICTURES_VERSION,
    STEP_FILE,
    UNKNOWN_BITS,
    AnchorManifest,
    FileEntry,
    Outcome,
    Plan,
    RankFiles,
    StepLink,
    StepManifest,
    has_pictures,
    outcome_document,
    rank_file,
)
from recorder.pictures.named import hashed
from recorder.pictures.shared import write_pictures
from recorder.tensors import FlatBatch, flatten, write_batch


@dataclass(frozen=True)
class RankStep:
    """One rank's data of a step; None for what the scope leaves out.

    It shares no memory with the trainer.
    """

    step: int
    version: int
    batch: FlatBatch
    plan: Plan | None = None
    outcome: Outcome | None = None
    learning: FlatBatch | None = None
    text: bytes | None = None
    calls: bytes | None = None


@dataclass(frozen=True)
class Committed:
    """A step that was committed: bytes of its files, and the link for the next one."""

    size_bytes: int
    link: StepLink


def learning_tensors(inputs: Mapping[str, Any], batch: FlatBatch) -> FlatBatch:
    """Flatten the trainer's tensors before its first loss, without those of the batch.

    The mask is kept: aligned to the next token, it is the trainer's own.
    """
    own = {key: value for key, value in inputs.items() if key not in batch.tensors or key == "loss_mask"}
    return flatten(own, any_padding=True)  # never padded again; a masked product leaves -0.0 there


def decode_rows(batch: FlatBatch, tokenizer: Any) -> bytes:
    """Return JSON lines with prompt, completion and reward of each row.

    The prompt ends where the trainer says, else before the first token in the loss mask.
    """
    arrays = {key: tensor.array for key, tensor in batch.tensors.items()}
    unknown = arrays.get("unknown", np.zeros(batch.num_rows, np.uint8))
    lines = []
    for row, (begin, end) in enumerate(zip(arrays["cu_seqlens"], arrays["cu_seqlens"][1:], strict=False)):
        ids, trained = arrays["input_ids"][begin:end].tolist(), arrays["loss_mask"][begin:end]
        split = int(trained.argmax()) if trained.any() else len(ids)
        if "prompt_length" in arrays and not unknown[row] & UNKNOWN_BITS["prompt_length"]:
            split = int(arrays["prompt_length"][row])
        reward = None if unknown[row] & UNKNOWN_BITS["rewards"] else float(arrays["rewards"][row])
        line = {
            "row": row,
            "prompt": tokenizer.decode(ids[:split]),
            "completion": tokenizer.decode(ids[split:]),
            "reward": reward,
        }
        lines.append(json_text(line) + "\n")
    return "".join(lines).encode()


def write_rank(folder: Path, rank: int, num_ranks: int, recorded: RankStep) -> RankFiles:
    """Write one rank's files of a step, durably, and its pictures that the record does not have."""
    trained, pictures = hashed(recorded.batch)
    write_pictures(folder.parent.parent, rank, pictures)
    documents = {
        ("plan", "json"): None if recorded.plan is None else json_bytes(vars(recorded.plan)),
        ("outcome", "json"): None
        if recorded.outcome is None
        else json_bytes(outcome_document(recorded.outcome)),
        ("text", "jsonl"): recorded.text,
        ("calls", "jsonl"): recorded.calls,
    }
    files = {}
    for (kind, suffix), data in documents.items():
        if data is not None:
            name = rank_file(kind, rank, num_ranks, suffix)
            write_durably(folder / name, data)
            files[name] = FileEntry(len(data), checksum(data))
    batches = {}
    for kind, batch in (("batch", trained), ("learning", recorded.learning)):
        if batch is not None:
            name = rank_file(kind, rank, num_ranks, "safetensors")
            batches[name] = write_batch(folder / name, batch)
    sync(folder)
    return RankFiles(batches, files)


def write_rank_manifest(folder: Path, rank: int, num_ranks: int, written: RankFiles) -> None:
    """Write a rank's entries of step.json for rank 0, atomically; read once, so without fsync."""
    path = folder / rank_file("manifest", rank, num_ranks, "json")
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(checksummed_bytes(vars(written)))
    temporary.rename(path)


def collect_rank_manifest(
    folder: Path, rank: int, num_ranks: int, wait_or_stop: Callable[[], bool] = lambda: True
) -> RankFiles:
    """Read and remove a rank's entries of step.json, waiting while `wait_or_stop` returns False.

    Raises RecordError if it returned True.
    """
    path = folder / rank_file("manifest", rank, num_ranks, "json")
    while not path.exists():
        if wait_or_stop():
            raise RecordError(f"rank {rank} has not written its files of {folder.name}: see that rank's log")
    written = parse_as(RankFiles, parse_checksummed(path.read_bytes(), path.name), path.name)
    path.unlink()
    return written


def commit_step(
    folder: Path, step: int, version: int, ranks: Sequence[RankFiles], previous: StepLink | None
) -> Committed:
    """Commit a step by renaming its step.json into place; `ranks` has the files by rank.

    `previous` is the step that was committed before it, None for the first of a record.
    """
    manifest = manifest_of(step, version, ranks, previous)
    data = checksummed_bytes(vars(manifest))
    sync(folder.parent)
    commit_file(folder / STEP_FILE, data)
    return Committed(manifest.size_bytes, StepLink(step, hashlib.sha256(data).hexdigest()))


def manifest_of(
    step: int, version: int, ranks: Sequence[RankFiles], previous: StepLink | None
) -> StepManifest:
    """Return the content of step.json."""
    batches = {name: entry for written in ranks for name, entry in written.batches.items()}
    files = {name: entry for written in ranks for name, entry in written.files.items()}
    format_version = PICTURES_VERSION if has_pictures(batches.values()) else FORMAT_VERSION
    return StepManifest(format_version, step, version, len(ranks), previous, batches, files)


def commit_anchor(folder: Path, step: int) -> None:
    """Commit a checkpoint folder: write anchor.json, with all checksums, last. Idempotent."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / ANCHOR_FILE)
    for path in paths:
        sync(path)
    files = {str(path.relative_to(folder)): FileEntry(**file_identity(path)) for path in paths}
    commit_file(folder / ANCHOR_FILE, checksummed_bytes(vars(AnchorManifest(FORMAT_VERSION, step, files))))
