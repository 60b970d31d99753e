"""Measure the time of the parity check at load, beside the time of loading, on this machine.

A random model with the sizes of Qwen2.5-0.5B by default; its folder is written first and removed at
the end. The last line calculates a model of 7B on one GPU node from the number of forwards: each
gathers all weights once.

    python benchmarks/parity_cost.py [--layers 24] [--dtype bfloat16] [--json]
"""

import argparse
import json
import tempfile
import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal_core.config import TrainEngineConfig
from areal_core.engine.parity import LENGTHS, measure_parity
from areal_core.engine.ranks import join_ranks, leave_ranks
from areal_core.trainer.build import shard_engine

NUM_FORWARDS = len(LENGTHS) - 1 + 2  # rows alone but that of one token, and packed rows twice
WEIGHTS_7B, LINK, START_S = 15.2e9, 200e9, 90.0  # bytes in bfloat16, bytes/s of NVLink, usual start


def main() -> None:
    """Build, load, check and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=options.layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    ranks = join_ranks("cpu")
    with tempfile.TemporaryDirectory() as folder:
        Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
        started = time.perf_counter()
        engine = shard_engine(TrainEngineConfig(path=folder, dtype=options.dtype), ranks)
        loaded = time.perf_counter()
        parity = measure_parity(engine)
        checked = time.perf_counter()
    leave_ranks()
    report = {
        "parameters": sum(p.numel() for p in engine.model.parameters()),
        "load_s": loaded - started,
        "check_s": checked - loaded,
        "difference": parity.difference,
        "share_of_start_7b": NUM_FORWARDS * WEIGHTS_7B / LINK / START_S,
    }
    if options.json:
        print(json.dumps(report))
        return
    print(f"{report['parameters']:,} parameters, {options.dtype}, one thread")
    print(f"load {report['load_s']:.1f} s, check {report['check_s']:.1f} s")
    print(f"largest difference {parity.difference:.2g} nats")
    print(
        f"by calculation, 7B on 8 GPUs: {100 * report['share_of_start_7b']:.1f} % of a start of {START_S:.0f} s"
    )


if __name__ == "__main__":
    main()
