"""Cost of gathering all weights for a weight update, over gloo on this machine.

    python benchmarks/gather_weights.py [--ranks 2] [--rounds 5] [--hidden 512] [--layers 12]
                                        [--vocabulary 32000]

Compared are: float32 masters gathered one parameter at a time and then cast to bfloat16; shards
cast before they are gathered, one parameter at a time; and in buckets, as the engine does. Bytes
are those that a rank receives. Medians of rounds, in turn; every way gives the same bits.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from areal_core.engine.full_weights import BUCKET_BYTES, FullTensors
from areal_core.engine.model import load_model
from areal_core.engine.ranks import join_ranks, leave_ranks
from areal_core.engine.sharding import full_tensor, shard_model

DTYPE = torch.bfloat16
DEFAULTS = {"ranks": 2, "rounds": 5, "hidden": 512, "layers": 12, "vocabulary": 32_000}


def make_model(folder: Path, options: argparse.Namespace) -> Path:
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 128),
        dtype="float32",
    )
    transformers_logging.disable_progress_bar()
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measure(options: argparse.Namespace) -> None:
    ranks = join_ranks("cpu")
    torch.set_num_threads(1)
    model = shard_model(load_model(options.model), ranks, dtype=DTYPE)

    def masters() -> dict[str, Tensor]:
        return {name: full_tensor(p.detach()).to(DTYPE) for name, p in model.named_parameters()}

    def in_buckets_of(size_bytes: int) -> dict[str, Tensor]:
        return dict(FullTensors(model, DTYPE, ranks.device, size_bytes))

    ways: dict[str, tuple[Callable[[], dict[str, Tensor]], int]] = {
        "masters, then cast": (masters, 4),
        "cast, then one at a time": (lambda: in_buckets_of(1), DTYPE.itemsize),
        "cast, then in buckets": (lambda: in_buckets_of(BUCKET_BYTES), DTYPE.itemsize),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    expected = masters()
    for _ in range(options.rounds):
        for name, (gather, _) in ways.items():
            ranks.barrier()
            start = time.perf_counter()
            found = gather()
            ranks.barrier()
            times[name].append(time.perf_counter() - start)
            assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    if ranks.rank == 0:
        num_weights = sum(tensor.numel() for tensor in expected.values())
        print(
            f"{ranks.world_size} ranks, {num_weights / 1e6:.1f} million weights, {len(expected)} parameters"
        )
        for name, (_, size_bytes) in ways.items():
            received = num_weights * size_bytes * (ranks.world_size - 1) / ranks.world_size
            seconds = statistics.median(times[name])
            print(
                f"{name}: {received / 1e6:.1f} MB, {seconds:.3f} s ({min(times[name]):.3f} to {max(times[name]):.3f})"
            )
    leave_ranks()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        measure(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", options)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        command = [sys.executable, *torchrun, __file__, *sys.argv[1:], f"--model={model}"]
        sys.exit(subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode)


if __name__ == "__main__":
    main()
