"""A training step on rows that begin with the same tokens: as a tree, and packed.

    python -m benchmarks.trees [--prompt 512] [--samples 8] [--completion 64] [--turns 1]
                               [--groups 1] [--rounds 4] [--model FOLDER] [--dtype float32]

Rows are `--samples` completions of each of `--groups` prompts. With `--turns N` each sample is an
agent's episode of N calls, a row per call: the prompt, of each call before it a shortened answer of
half of `--completion` tokens and a reply of `--completion` tokens, and the call's completion. Only
completions are in the loss mask.

Both ways are one engine on the same weights, in turn: float32 master weights, AdamW, a loss with
entropies. Prints the tokens that each computes, the largest relative difference of a gradient, the
rise of the peak memory by a step (each in a new process), and ratios of the time of packed steps to
that of tree steps, of consecutive steps; ratios of CPU time also hold on a busy machine.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from areal_core.config import MicroBatchSpec, TrainEngineConfig
from areal_core.data.batch import Batch
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.ranks import Ranks, join_ranks, leave_ranks
from areal_core.engine.sharding import full_tensor
from areal_core.testing import likelihood_with_entropy
from areal_core.trainer.build import build_engine
from benchmarks.harness import in_new_process, read_options, rise_of_peak_mib, say
from benchmarks.train_step import OPTIMIZER, make_model, pairs_in_turn

WAYS = {"packed": False, "tree": True}


def make_rows(options: argparse.Namespace, vocabulary: int) -> Batch:
    """Return next-token aligned rows of random tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    rows: list[tuple[int, list[int], list[int]]] = []  # prompt_id, context, completion
    for group in range(options.groups):
        prompt = draw(options.prompt)
        for _ in range(options.samples):
            context = prompt
            for _ in range(options.turns):
                rows.append((group, context, draw(options.completion)))
                context = context + draw(options.completion // 2) + draw(options.completion)
    lengths = torch.tensor([len(context) + len(completion) for _, context, completion in rows])
    starts = torch.tensor([len(context) - 1 for _, context, _ in rows])
    position = torch.arange(int(lengths.max()))
    ids = torch.zeros(len(rows), len(position), dtype=torch.int32)
    for place, (_, context, completion) in enumerate(rows):
        ids[place, : lengths[place]] = torch.tensor(context + completion)
    trained = (position >= starts[:, None]) & (position < lengths[:, None] - 1)
    return {
        "input_ids": ids,
        "attention_mask": position < lengths[:, None],
        "loss_mask": trained.int(),
        "prompt_id": torch.tensor([group for group, _, _ in rows]),
    }


def make_engine(ranks: Ranks, options: argparse.Namespace) -> FSDPEngine:
    config = TrainEngineConfig(
        path=options.model,
        dtype=options.dtype,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=options.tokens),
        optimizer=OPTIMIZER,
        enable_tree_training=True,
    )
    engine = build_engine(config, ranks, total_steps=1000)
    assert engine.shares_prefixes
    return engine


def num_trained(batch: Batch) -> Tensor:
    return batch["loss_mask"].sum()


def step(engine: FSDPEngine, batch: Batch, way: str) -> float:
    """Take a step; return its gradient norm."""
    engine.shares_prefixes = WAYS[way]
    return engine.train_batch(batch, likelihood_with_entropy, num_trained).grad_norm


def gradients(engine: FSDPEngine, batch: Batch, way: str) -> tuple[list[Tensor], int]:
    """Return the gradients of a batch, and the number of tokens computed."""
    engine.shares_prefixes = WAYS[way]
    engine.model.train()
    total = float(num_trained(batch))
    parts = [
        engine.backward(batch, rows, likelihood_with_entropy, num_trained, total)
        for rows in engine.divide(batch)
    ]
    found = [full_tensor(p.grad).clone() for p in engine.model.parameters() if p.grad is not None]
    engine.model.zero_grad()
    return found, sum(part.num_computed for part in parts)


def peak_mib(way: str, options: argparse.Namespace) -> float:
    ranks = join_ranks("cpu")
    torch.set_num_threads(1)
    engine = make_engine(ranks, options)
    batch = make_rows(options, engine.model.config.vocab_size)
    step(engine, {key: tensor[:1] for key, tensor in batch.items()}, way)  # allocates optimizer states
    rise = rise_of_peak_mib(lambda: step(engine, batch, way))
    leave_ranks()
    return rise


def measure(options: argparse.Namespace) -> None:
    peaks = {way: in_new_process(peak_mib, way, options) for way in WAYS}
    ranks = join_ranks("cpu")
    torch.set_num_threads(1)
    engine = make_engine(ranks, options)
    batch = make_rows(options, engine.model.config.vocab_size)
    found = {way: gradients(engine, batch, way) for way in WAYS}
    pairs = list(zip(*(tensors for tensors, _ in found.values()), strict=True))
    apart = max(float((tree - packed).norm() / packed.norm()) for packed, tree in pairs)
    print(
        f"{len(batch['input_ids'])} rows, {found['packed'][1]:,} tokens packed, {found['tree'][1]:,} in trees; "
        f"gradients differ by up to {apart:.1e}; memory of a step {peaks['packed']:,.0f} MiB packed, "
        f"{peaks['tree']:,.0f} MiB as a tree",
        flush=True,
    )
    ways = [partial(step, engine, batch, way) for way in WAYS]
    say("packed to tree", pairs_in_turn(ranks, *ways, options.rounds))
    leave_ranks()


def main() -> None:
    options = read_options(
        __doc__,
        prompt=512,
        samples=8,
        completion=64,
        turns=1,
        groups=1,
        rounds=4,
        hidden=256,
        layers=12,
        vocabulary=4096,
        tokens=16384,
        dtype=("float32", "bfloat16"),
        model="",
    )
    with tempfile.TemporaryDirectory() as folder:
        options.model = options.model or str(make_model(Path(folder) / "model", options))
        measure(options)


if __name__ == "__main__":
    main()
