"""Train two steps under each of several options, on all ranks of the job.

Prints the checksums and losses of each option. Arguments: model folder, and a larger model whose
loading is measured ("" for none).
"""

import copy
import ctypes
import gc
from pathlib import Path

import torch

from areal_core.config import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.ranks import Ranks, join_ranks
from areal_core.trainer.build import build_engine, shard_engine
from tests.engine import steps_program as steps

SAME_BITS = {
    "as it is": {},
    "parameters in host memory": {"fsdp.offload_params": True},
    "optimizer states in host memory": {"optimizer.offload": True},
    "optimizer steps layer by layer": {"fsdp.per_layer_optim_step": True},
    "asleep between steps": {"offload": True},
    "activations recomputed": {"gradient_checkpointing": True},
    "every rank reads": {"fsdp.memory_efficient_load": False},
    "all at once": {
        "fsdp.memory_efficient_load": True,
        "fsdp.per_layer_optim_step": True,
        "optimizer.offload": True,
        "offload": True,
        "gradient_checkpointing": True,
    },
}


def make_options(model: str, changes: dict[str, object]) -> TrainEngineConfig:
    options = TrainEngineConfig(
        path=model,
        dtype="float32",
        mb_spec=MicroBatchSpec(max_tokens_per_mb=26),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0),
    )
    for name, value in changes.items():
        *section, option = name.split(".")
        holder = getattr(options, section[0]) if section else options
        assert hasattr(holder, option), name
        setattr(holder, option, value)
    return copy.deepcopy(options)


def train_step(engine: FSDPEngine, batch: dict[str, torch.Tensor]) -> float:
    """Take one step of maximum likelihood, let the engine sleep, and return the loss."""
    loss = steps.train_step(engine, batch)["loss"]
    engine.sleep()
    return loss


def train(ranks: Ranks, model: str, changes: dict[str, object]) -> dict[str, object]:
    torch.manual_seed(ranks.rank)
    engine = build_engine(make_options(model, changes), ranks, total_steps=10)
    batch = steps.rows(ranks.rank, ranks.world_size)
    losses = [train_step(engine, batch) for _ in range(2)]
    return {"losses": losses, "checksums": engine.checksums()}


def rise_of_peak_mib(ranks: Ranks, model: str, changes: dict[str, object]) -> list[float]:
    """Return the rise of the peak host memory of each rank, in MiB, while it reads a model."""
    options = make_options(model, changes)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory would hide new allocations
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory_mib("VmRSS")
    shard_engine(options, ranks)
    return ranks.gather_objects(memory_mib("VmHWM") - before)


def memory_mib(name: str) -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024


def main(model: str, larger: str) -> object:
    ranks = join_ranks("cpu")
    found: dict[str, object] = {name: train(ranks, model, changes) for name, changes in SAME_BITS.items()}
    if larger:
        found["peaks"] = {
            name: rise_of_peak_mib(ranks, larger, {"fsdp.memory_efficient_load": value})
            for name, value in {"rank 0 reads": True, "every rank reads": False}.items()
        }
    return found
