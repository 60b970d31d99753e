"""Packed compared with padded micro-batches: a training step on rows with long-tailed lengths.

    python benchmarks/packing.py [--rows 24] [--rounds 4] [--tokens 2048] [--median 96]
                                 [--spread 1.0]

Lengths are log-normal: half of the rows are shorter than `--median`, and `--spread` is the standard
deviation of the logarithm. Each way has the same limit of tokens per micro-batch. Packed is the
engine. Padded is the bare loop of train_step.py on rows padded to the longest of their micro-batch,
with the mask that Transformers makes of it: in the order of the batch, and sorted by length, which
pads least. Padding counts as tokens, since the model computes it.
"""

import argparse
import tempfile
from functools import partial
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
    with_entropies,
)

from areal_core.data.batch import Batch, select_rows, sequence_lengths
from areal_core.engine.ranks import join_ranks, leave_ranks


def long_tailed(count: int, median: int, spread: float, longest: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    lengths = median * torch.exp(spread * torch.randn(count, generator=generator))
    return lengths.round().clamp(8, longest).int().tolist()


def padded(batch: Batch, max_tokens: int, is_sorted: bool) -> list[Packed]:
    """Micro-batches of padded rows, as many rows as fit."""
    found: list[Packed] = []
    rows: list[int] = []
    lengths = sequence_lengths(batch).tolist()
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row]) if is_sorted else range(len(lengths))
    for row in order:
        if rows and (len(rows) + 1) * max(lengths[r] for r in [*rows, row]) > max_tokens:
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
    scale = 1 / int(batch["loss_mask"].sum())
    print(
        f"{options.rows} rows of {min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} in all, in "
        f"{len(engine.divide(batch))} packed micro-batches of at most {options.tokens}"
    )
    for is_sorted in (False, True):
        micro_batches = padded(batch, options.tokens, is_sorted)
        pack_them = partial(engine_step, engine, batch)
        pad_them = partial(bare_step, bare, adam, micro_batches, scale, with_entropies)
        norms = pack_them(), pad_them()
        num_padded = sum(micro.labels.numel() for micro in micro_batches)
        print(
            f"{'sorted by length' if is_sorted else 'in their order'}: {num_padded / sum(lengths):.2f} times the tokens with padding, "
            f"in {len(micro_batches)} micro-batches; gradient norms {norms[0]:.6f} packed, {norms[1]:.6f} padded"
        )
        say("padded to packed", in_turn(ranks, pad_them, pack_them, options.rounds))
    leave_ranks()


if __name__ == "__main__":
    main()
