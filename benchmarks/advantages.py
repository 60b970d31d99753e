"""Time of what a step computes between its forward passes: advantages, statistics, row cutting.

128 rows of up to 32,768 tokens on one thread: `python benchmarks/advantages.py`. The rows are
prompts and completions with tool output in between; every second one is shorter than the longest.
"""

import argparse
import time
from collections.abc import Callable

import torch

from areal_core.algorithm.advantages import compute_advantages, gae
from areal_core.algorithm.alignment import to_next_token
from areal_core.algorithm.normalization import normalize_tokens
from areal_core.algorithm.off_policy import second_moment_mask
from areal_core.data.batch import Batch, pack, select_rows
from areal_core.telemetry import Stats
from areal_core.trainer.step_stats import log_batch, log_versions

GROUP = 8
NUM_MINIBATCHES, NUM_MICRO_BATCHES = 4, 4


def make_batch(num_rows: int, width: int) -> Batch:
    """Make a batch of prompts, completions and tool output."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.where(torch.arange(num_rows) % 2 == 0, width, width * 5 // 8)
    positions = torch.arange(width)
    real = positions < lengths[:, None]
    sampled = real & (positions >= width // 16) & (positions % 4096 < 3584)
    logprobs = -torch.rand(num_rows, width, generator=generator) * sampled
    return {
        "input_ids": torch.randint(100, (num_rows, width), generator=generator, dtype=torch.int32),
        "attention_mask": real,
        "loss_mask": sampled.int(),
        "logprobs": logprobs,
        "versions": torch.where(sampled, 3, -1).int(),
        "rewards": torch.rand(num_rows, generator=generator),
        "prompt_id": torch.arange(num_rows) // GROUP,
        "sample_id": (torch.arange(num_rows) % GROUP).int(),
        "finish_reason": torch.zeros(num_rows, dtype=torch.int32),
    }


def cut_rows(batch: Batch) -> None:
    """Cut a batch into minibatches, these into micro-batches, and pack each of them."""
    num_rows = len(batch["rewards"])
    for minibatch in torch.arange(num_rows).chunk(NUM_MINIBATCHES):
        rows = select_rows(batch, minibatch.tolist())
        for micro_batch in torch.arange(len(minibatch)).chunk(NUM_MICRO_BATCHES):
            pack(select_rows(rows, micro_batch.tolist()))


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call."""
    call()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return sorted(times)[repeats // 2] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--width", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)

    batch = make_batch(options.rows, options.width)
    aligned = to_next_token(batch)
    mask, logprobs = aligned["loss_mask"].bool(), aligned["logprobs"]
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(mask.shape, generator=generator)
    rewards, bootstrap = torch.randn(mask.shape, generator=generator), torch.zeros(options.rows)
    facts = (batch["rewards"], mask, logprobs, batch["attention_mask"], batch["finish_reason"])
    learned = compute_advantages(*facts)
    inputs = aligned | {
        "prox_logp": logprobs,
        "entropy": logprobs,
        "advantages": learned.advantages,
        "returns": learned.returns,
        "kl_rewards": learned.kl_rewards,
        "total_rewards": learned.total_rewards,
    }

    def record_statistics() -> None:
        stats = Stats()
        log_batch(stats, batch, inputs)
        log_versions(stats, batch, 4)
        stats.export()

    groups = batch["prompt_id"]
    parts = {
        "GAE with values": lambda: gae(rewards, values, mask, bootstrap, 0.99, 0.95),
        "GAE without values": lambda: gae(rewards, None, mask, bootstrap, 1.0, 1.0),
        "compute_advantages, no critic": lambda: compute_advantages(*facts),
        "normalisation over the batch": lambda: normalize_tokens(rewards, mask),
        "normalisation over groups": lambda: normalize_tokens(
            rewards, mask, group_ids=groups, mean_level="group", std_level="group"
        ),
        "M2PO": lambda: second_moment_mask(rewards, values, mask, 0.04),
        "statistics": record_statistics,
        f"row cutting, {len(inputs)} keys": lambda: cut_rows(inputs),
    }
    for name, call in parts.items():
        print(f"{name:32} {milliseconds(call, options.repeats):9.1f} ms", flush=True)


if __name__ == "__main__":
    main()
