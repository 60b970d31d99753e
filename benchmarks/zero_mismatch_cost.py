"""Measure what `attn_impl=batch_invariant` costs: sampling, scoring and a training step.

The same requests are sampled by the fast engine and by the invariant one in turn, and the same rows
scored and trained on with `sdpa` and `batch_invariant`. Times are of this process's processor, so
that other load on the machine changes them little; the ratio is that of the medians.

    python benchmarks/zero_mismatch_cost.py MODEL [--dtype float32] [--requests 64] [--rounds 9]
                                                  [--json]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from areal_core.config import OptimizerConfig, TrainEngineConfig
from areal_core.engine.ranks import join_ranks, leave_ranks
from areal_core.trainer.build import add_optimizer, shard_engine
from consistency.exact import EmbeddedTarget, Request, batch_with_mask

NUM_NEW = 96  # tokens of a completion


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the processor's time of a call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def medians(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Run each work in turn, after one round that is not counted; return median seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            taken = cpu_seconds(work)
            if number:
                seconds[name].append(taken)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    fast = EmbeddedTarget(options.model, options.dtype, is_invariant=False)
    invariant = EmbeddedTarget(options.model, options.dtype)
    lengths = torch.randint(1, 96, (options.requests,), generator=generator).tolist()
    prompts = [torch.randint(fast.vocabulary_size, (n,), generator=generator).tolist() for n in lengths]
    requests = [Request(prompt, seed) for seed, prompt in enumerate(prompts)]

    def sampling(target: EmbeddedTarget) -> Callable[[], object]:
        def work() -> object:
            target.flush()
            return target.sample(requests, options.requests, NUM_NEW)

        return work

    report = {"sampling": medians({"fast": sampling(fast), "invariant": sampling(invariant)}, options.rounds)}
    completed = fast.sample(requests, options.requests, NUM_NEW)
    batch = batch_with_mask([(p, row.tokens) for p, row in zip(prompts, completed, strict=True)])
    ranks = join_ranks("cpu")
    engines = {}
    for name, attention in (("fast", "sdpa"), ("invariant", "batch_invariant")):
        config = TrainEngineConfig(path=options.model, dtype=options.dtype, attn_impl=attention)
        engines[name] = shard_engine(config, ranks)
        add_optimizer(engines[name], OptimizerConfig(), config.fsdp, 1000)
    report["scoring"] = medians(
        {name: lambda e=engine: e.score(batch) for name, engine in engines.items()}, options.rounds
    )
    report["training"] = medians(
        {
            name: lambda e=engine: e.train_batch(
                batch,
                lambda logprobs, _, flat: -(logprobs * flat["loss_mask"]).sum(),
                lambda part: part["loss_mask"].sum(),
            )
            for name, engine in engines.items()
        },
        options.rounds,
    )
    leave_ranks()
    for times in report.values():
        times["ratio"] = times["invariant"] / times["fast"]
    if options.json:
        print(json.dumps(report))
        return
    print(
        f"{options.model}, {options.dtype}, one thread, {options.requests} requests, median of {options.rounds}"
    )
    for name, times in report.items():
        print(
            f"{name:<9} fast {times['fast']:.3f} s, invariant {times['invariant']:.3f} s, ratio {times['ratio']:.3f}"
        )


if __name__ == "__main__":
    main()
