"""Packed against padded: a training step on rows whose lengths have a long tail, each way within the same count of tokens a micro-batch.

    python benchmarks/packing.py [--rows 24] [--rounds 4] [--tokens 2048] [--median 96] [--spread 1.0]

Lengths are log-normal: half of the rows are shorter than `--median`, and `--spread` is the standard deviation of the logarithm. Packed is
the engine. Padded is the bare loop of train_step.py on rows padded to the longest of their micro-batch, in the order of their lengths
(which pads least), with the mask that Transformers makes of it; padding counts as tokens, since the model computes it.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from train_step import (
    Packed,
    bare_step,
    engine_step,
    in_turn,
    make_bare,
    make_engine,
    make_model,
    make_rows,
    say,
)

from areal_core.batch import Batch, select_rows, sequence_lengths
from areal_core.engine.ranks import join_ranks, leave_ranks


def long_tailed(count: int, median: int, spread: float, longest: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    lengths = median * torch.exp(spread * torch.randn(count, generator=generator))
    return lengths.round().clamp(8, longest).int().tolist()


def padded(batch: Batch, max_tokens: int) -> list[Packed]:
    """Micro-batches of padded rows, the longest first, as many rows as fit."""
    found, rows = [], []
    lengths = sequence_lengths(batch).tolist()
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if rows and (len(rows) + 1) * lengths[rows[0]] > max_tokens:
            found.append(padded_rows(batch, rows))
            rows = []
        rows.append(row)
    return [*found, padded_rows(batch, rows)]


def padded_rows(batch: Batch, rows: list[int]) -> Packed:
    part = select_rows(batch, rows)
    ids, mask = part["input_ids"].long(), part["attention_mask"]
    labels = ids.roll(-1, 1).masked_fill(part["loss_mask"] == 0, -100)
    return Packed({"input_ids": ids, "attention_mask": mask.long()}, labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"hidden": 256, "layers": 6, "vocabulary": 8192, "tokens": 2048}
    for name, default in {"rows": 24, "rounds": 4, "median": 96, **sizes}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--spread", type=float, default=1.0)
    options = parser.parse_args()
    lengths = long_tailed(options.rows, options.median, options.spread, options.tokens)
    ranks = join_ranks("cpu")
    torch.set_num_threads(1)
    batch = make_rows(lengths, options.vocabulary, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model(Path(folder), options))
        engine = make_engine(ranks, model, options.tokens)
        bare, adam = make_bare(ranks, model, "sdpa")
    micro_batches = padded(batch, options.tokens)
    scale = 1 / int(batch["loss_mask"].sum())

    def pack_them() -> float:
        return engine_step(engine, batch)

    def pad_them() -> float:
        return bare_step(bare, adam, micro_batches, scale)

    norms = pack_them(), pad_them()
    ratios = in_turn(ranks, pad_them, pack_them, options.rounds)
    num_padded = sum(micro.labels.numel() for micro in micro_batches)
    print(
        f"{options.rows} rows of {min(lengths)} to {max(lengths)} tokens: {sum(lengths):,} tokens, {num_padded:,} with padding "
        f"({num_padded / sum(lengths):.2f} times) in {len(micro_batches)} micro-batches against {len(engine.divide(batch))}; "
        f"gradient norms {norms[0]:.6f} and {norms[1]:.6f}"
    )
    say("padded to packed", ratios)
    leave_ranks()


if __name__ == "__main__":
    main()
