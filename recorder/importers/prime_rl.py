"""prime-rl: `rollouts/step_N/rank_R.bin` (filesystem transport), `token_exports/*/*.jsonl`.

A .bin file is MessagePack of a list of micro-batches, each a list of 16 positions. Sequences are
packed one after another; padding follows the last one (its tokens have no environment name), and
fully masked copies fill ranks that have fewer micro-batches.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat
from recorder.importers.foreign import Foreign, Step, as_tokens, full_sequence, member, number_in
from recorder.importers.msgpack import unpack
from recorder.trainers.sample import Sample

IDS, MASK, ADVANTAGES, LOGPROBS, LENGTHS, ENVIRONMENTS = 0, 1, 2, 3, 5, 7
NUM_POSITIONS = 16
EXPORT_VERSION = 1
NOTES = (
    "rewards are not in the file: each sample's mean advantage is recorded as its reward; replay with actor.reward_norm=null "
    "and actor.adv_norm=null",
    "groups are not in the file: every sample is a group of its own",
    "micro-batches and ranks are not kept: all samples of a step become one batch",
    "weight versions and finish reasons are not in the file",
    "weights and optimizer are not in the file: choose the model for a replay",
)


def recognises(path: Path) -> bool:
    """Return whether the path is or contains files `rank_*.bin` or `rank_*.jsonl`."""
    return bool(step_files(path))


def step_files(path: Path) -> dict[Path, list[Path]]:
    """Return the files of all ranks by folder, in order; the .bin files if both kinds exist."""
    if path.is_file():
        return (
            {path.parent: [path]}
            if path.name.startswith("rank_") and path.suffix in (".bin", ".jsonl")
            else {}
        )
    for suffix in ("bin", "jsonl"):
        files = sorted(path.rglob(f"rank_*.{suffix}"), key=lambda file: number_in(file.stem))
        folders = sorted({file.parent for file in files}, key=lambda folder: number_in(folder.name))
        if files:
            return {folder: [file for file in files if file.parent == folder] for folder in folders}
    return {}


def read(path: Path) -> Foreign:
    """Read one step per folder. Raises ForeignFormat."""
    steps = []
    for folder, files in step_files(path).items():
        samples = [
            sample
            for file in files
            for sample in (read_bin(file) if file.suffix == ".bin" else read_export(file))
        ]
        steps.append(Step(folder.name, samples))
    return Foreign("prime-rl", steps, NOTES)


def read_bin(file: Path) -> Iterator[Sample]:
    """Yield the samples of a rank, without padding and without fully masked copies."""
    try:
        micro_batches = unpack(file.read_bytes())
    except ForeignFormat as error:
        raise ForeignFormat(f"{file}: {error}") from None
    for number, micro_batch in enumerate(micro_batches):
        where = f"{file}, micro-batch {number}"
        if not isinstance(micro_batch, list) or len(micro_batch) != NUM_POSITIONS:
            raise ForeignFormat(
                f"{where} is not a list of {NUM_POSITIONS} positions: another version of prime-rl wrote it"
            )
        yield from split(micro_batch, where)


def split(micro_batch: list[Any], where: str) -> Iterator[Sample]:
    """Yield the sequences of a micro-batch."""
    columns = {name: np.asarray(micro_batch[name]) for name in (IDS, MASK, ADVANTAGES, LOGPROBS)}
    real = np.array([name != "" for name in micro_batch[ENVIRONMENTS]], bool)
    size = len(columns[IDS])
    if sum(micro_batch[LENGTHS]) != size or any(len(column) != size for column in (*columns.values(), real)):
        raise ForeignFormat(f"{where}: its columns and sequence_lengths do not agree on {size} tokens")
    end = 0
    for number, length in enumerate(micro_batch[LENGTHS]):
        part = np.arange(end, end + length)[real[end : end + length]]
        end += length
        if columns[MASK][part].any():
            yield make_sample(
                {name: column[part] for name, column in columns.items()}, f"{where}, sequence {number}"
            )


def make_sample(columns: Mapping[int, np.ndarray], where: str) -> Sample:
    """Build the sample of a sequence; its reward is its mean advantage."""
    mask = columns[MASK].astype(np.int32)
    return Sample(
        tokens=as_tokens(columns[IDS], where),
        loss_mask=mask,
        logprobs=full_sequence(columns[LOGPROBS], mask, np.float32),
        reward=float(columns[ADVANTAGES][mask != 0].mean()),
        group=where,
    )


def read_export(file: Path) -> Iterator[Sample]:
    """Yield the sequences of a token export."""
    for number, line in enumerate(file.read_text().splitlines()):
        where = f"{file}, line {number + 1}"
        row = json.loads(line)
        version = member(row, "schema_version", where)
        if version != EXPORT_VERSION:
            raise ForeignFormat(f"{where} has schema_version {version}, {EXPORT_VERSION} expected")
        names = {
            IDS: "token_ids",
            MASK: "loss_mask",
            ADVANTAGES: "advantages",
            LOGPROBS: "inference_logprobs",
        }
        columns = {position: np.asarray(member(row, name, where)) for position, name in names.items()}
        if columns[MASK].any():
            yield make_sample(columns, where)
