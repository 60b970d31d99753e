"""Writes a record while a run trains: an observer on every data-parallel rank, committed by rank 0.

    rank r   `step` ─> batch, plan, outcome ─ fsync ─> manifest ─> barrier ─> goes on training
    rank 0   `step` ─> batch, plan, outcome ─ fsync ─────────────> barrier ─> takes the manifests ─> step.json

Everybody waits in the barrier for the slowest rank's disk; nobody but rank 0 waits for step.json. A step without step.json never
happened, so a process may die at any byte.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from recorder.environment import environment, file_identity, folder_identity
from recorder.errors import RecordError, RecordExists
from recorder.format import (
    ANCHOR_FILE,
    ANCHORS_FOLDER,
    FORMAT_VERSION,
    RECORD_FILE,
    STEP_FILE,
    STEPS_FOLDER,
    AnchorManifest,
    FileEntry,
    Outcome,
    Plan,
    RankFiles,
    RecordHeader,
    StepManifest,
    outcome_document,
    parse_rank_files,
    rank_file,
    step_name,
)
from recorder.outcome import OutcomeObserver
from recorder.sealed import (
    checksum,
    commit_file,
    json_bytes,
    json_text,
    seal,
    sync,
    unseal,
    write_durably,
)
from recorder.tensors import FlatBatch, flatten, write_batch


class RecordWriter:
    """An observer that records a run into `folder`, which all ranks share.

    `rank` and `num_ranks` count data-parallel ranks; `barrier` returns when every rank has called it. `overwrite` clears a record that
    is already there when the run starts. `text` also stores decoded prompts and completions. Raises RecordExists when the folder
    holds a record (unless `overwrite`) or anything else.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        num_ranks: int,
        barrier: Callable[[], None],
        overwrite: bool = False,
        text: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.rank, self.num_ranks, self.barrier, self.text = rank, num_ranks, barrier, text
        self.outcome = OutcomeObserver(self.write_step)
        self.tokenizer: Any = None
        self.batch: FlatBatch | None = None
        self.plan: Plan | None = None
        check_folder(self.folder, overwrite)

    def __call__(self, event: str, **facts: Any) -> None:
        """Takes one event with the facts of ARCHITECTURE.md; `batch`, `step` and `start` may raise RecordError or OSError."""
        if event == "start":
            self.start(**facts)
        elif event == "batch":
            # copies: the trainer is free to change its tensors afterwards
            self.batch = flatten(facts["batch"])
            self.plan = Plan(facts["step"], facts["version"], dict(facts["rng"]), {})
        elif event == "step" and self.plan is not None:
            self.plan = replace(self.plan, details=facts["plan"])
        self.outcome(event, **facts)

    def start(self, **facts: Any) -> None:
        """Rank 0 clears the folder and writes record.json."""
        if facts["data_parallel_size"] != self.num_ranks or facts["data_parallel_rank"] != self.rank:
            raise RecordError(
                f"the run is data-parallel rank {facts['data_parallel_rank']} of {facts['data_parallel_size']}, "
                f"its RecordWriter {self.rank} of {self.num_ranks}: build it with the run's numbers"
            )
        self.tokenizer = facts["tokenizer"]
        self.barrier()  # every rank has looked into the folder before rank 0 writes into it
        if self.rank == 0:
            clear_record(self.folder)
            write_header(self.folder, describe_run(facts))
        self.barrier()  # nobody writes a step before the folder is cleared

    def write_step(self, outcome: Outcome) -> None:
        """Writes this rank's files and, on rank 0, commits the step once all ranks have theirs on disk."""
        batch, plan = self.batch, self.plan
        if batch is None or plan is None or plan.step != outcome.step:
            raise RecordError(f"step {outcome.step} ended without a `batch` event: send one before `step`")
        folder = self.folder / STEPS_FOLDER / step_name(outcome.step)
        folder.mkdir(parents=True, exist_ok=True)
        text = decode_rows(batch, self.tokenizer) if self.text and self.tokenizer is not None else None
        written = write_rank(folder, self.rank, self.num_ranks, batch, plan, outcome, text)
        if self.rank != 0:
            hand_over(folder, self.rank, self.num_ranks, written)
        self.batch = self.plan = None
        self.barrier()
        if self.rank == 0:
            others = [take_over(folder, rank, self.num_ranks) for rank in range(1, self.num_ranks)]
            commit_step(folder, outcome.step, outcome.version, [written, *others])


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raises RecordExists unless a record may be written here: absent, empty, or a record and `overwrite`."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RecordExists(f"{folder} is a file: give a folder to record into")
    names = {path.name for path in folder.iterdir()}
    if RECORD_FILE in names and not overwrite:
        raise RecordExists(f"{folder} already holds a record: choose another folder, or ask to overwrite it")
    allowed = {RECORD_FILE, STEPS_FOLDER, ANCHORS_FOLDER} if RECORD_FILE in names else set()
    if foreign := sorted(names - allowed):
        raise RecordExists(f"{folder} holds {foreign}, which is no part of a record: choose another folder")


def clear_record(folder: Path) -> None:
    """Makes the folder, or empties it of a record. record.json goes last: half cleared, it is still a record."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (STEPS_FOLDER, ANCHORS_FOLDER):
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    (folder / RECORD_FILE).unlink(missing_ok=True)


def describe_run(facts: Mapping[str, Any]) -> RecordHeader:
    """The header of a run from the facts of its `start` event."""
    config, tokenizer = facts["config"], facts["tokenizer"]
    return RecordHeader(
        format_version=FORMAT_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=facts["world_size"],
        num_ranks=facts["data_parallel_size"],
        allocation=config.get("allocation_mode"),
        model=folder_identity(str(facts["model_path"])),
        tokenizer=None if tokenizer is None else folder_identity(str(tokenizer.name_or_path)),
        environment=environment(),
        config=config,
    )


def write_header(folder: Path, header: RecordHeader) -> None:
    """Commits record.json."""
    commit_file(folder / RECORD_FILE, seal(vars(header)))


def decode_rows(batch: FlatBatch, tokenizer: Any) -> bytes:
    """JSON lines: prompt, completion and reward of each row. The prompt ends at the first token that the model sampled."""
    arrays = {key: tensor.array for key, tensor in batch.tensors.items()}
    lines = []
    for row, (begin, end) in enumerate(zip(arrays["cu_seqlens"], arrays["cu_seqlens"][1:], strict=False)):
        ids, trained = arrays["input_ids"][begin:end].tolist(), arrays["loss_mask"][begin:end]
        split = int(trained.argmax()) if trained.any() else len(ids)
        line = {
            "row": row,
            "prompt": tokenizer.decode(ids[:split]),
            "completion": tokenizer.decode(ids[split:]),
            "reward": float(arrays["rewards"][row]),
        }
        lines.append(json_text(line) + "\n")
    return "".join(lines).encode()


def write_rank(
    folder: Path,
    rank: int,
    num_ranks: int,
    batch: FlatBatch,
    plan: Plan,
    outcome: Outcome,
    text: bytes | None,
) -> RankFiles:
    """Writes one rank's files of a step, durably."""
    documents = {
        rank_file("plan", rank, num_ranks, "json"): json_bytes(vars(plan)),
        rank_file("outcome", rank, num_ranks, "json"): json_bytes(outcome_document(outcome)),
    }
    if text is not None:
        documents[rank_file("text", rank, num_ranks, "jsonl")] = text
    for name, data in documents.items():
        write_durably(folder / name, data)
    batch_name = rank_file("batch", rank, num_ranks, "safetensors")
    batch_entry = write_batch(folder / batch_name, batch)
    sync(folder)
    return RankFiles(
        batches={batch_name: batch_entry},
        files={name: FileEntry(len(data), checksum(data)) for name, data in documents.items()},
    )


def hand_over(folder: Path, rank: int, num_ranks: int, written: RankFiles) -> None:
    """Leaves a rank's part of step.json for rank 0; not waited for, because it is read once and never again."""
    (folder / rank_file("manifest", rank, num_ranks, "json")).write_bytes(seal(vars(written)))


def take_over(folder: Path, rank: int, num_ranks: int) -> RankFiles:
    """Takes a rank's part of step.json away."""
    path = folder / rank_file("manifest", rank, num_ranks, "json")
    written = parse_rank_files(unseal(path.read_bytes(), path.name), path.name)
    path.unlink()
    return written


def commit_step(folder: Path, step: int, version: int, ranks: Sequence[RankFiles]) -> None:
    """Writes step.json, whose rename is the commit; `ranks` are what every rank wrote, in order."""
    batches = {name: entry for written in ranks for name, entry in written.batches.items()}
    files = {name: entry for written in ranks for name, entry in written.files.items()}
    manifest = StepManifest(FORMAT_VERSION, step, version, len(ranks), batches, files)
    sync(folder.parent)
    commit_file(folder / STEP_FILE, seal(vars(manifest)))


def commit_anchor(folder: Path, step: int) -> None:
    """Seals a checkpoint folder: lists every file under it with its checksum in anchor.json, written last."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        sync(path)
    files = {str(path.relative_to(folder)): FileEntry(**file_identity(path)) for path in paths}
    commit_file(folder / ANCHOR_FILE, seal(vars(AnchorManifest(FORMAT_VERSION, step, files))))
