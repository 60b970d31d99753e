"""Train under several ways of sharding, on all ranks; print losses and weights.

Arguments: model folder, and a folder for a checkpoint.
"""

import torch

from areal_core.engine.checkpoint.distributed import load_checkpoint, save_checkpoint
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.full_weights import FullTensors
from areal_core.engine.ranks import Ranks, join_ranks
from areal_core.engine.sharding import full_tensor
from areal_core.trainer.build import build_engine
from tests.engine import options_program as options

WAYS = {
    "plain": {},
    "hybrid": {"fsdp.shard_size": 2},
    "one sum": {"fsdp.sync_every_micro_batch": False},
    "both": {"fsdp.shard_size": 2, "fsdp.sync_every_micro_batch": False},
}


def train(ranks: Ranks, model: str, changes: dict[str, object]) -> dict[str, object]:
    engine = build_engine(options.make_options(model, changes), ranks, total_steps=10)
    batch = options.steps.rows(ranks.rank, ranks.world_size)
    found = [options.steps.train_step(engine, batch) for _ in range(2)]
    local = next(engine.model.parameters()).to_local().shape[0]
    return {
        "steps": found,
        "same_gather": gathers_the_same_bits(engine),
        "rows": ranks.gather_objects(local),
        "weights": {name: tensor.double().norm().item() for name, tensor in engine.named_full_tensors()},
    }


def resumed(ranks: Ranks, model: str, folder: str) -> list[dict[str, object]]:
    """Return a second step: straight on, and from a checkpoint, with and without copies."""
    batch = options.steps.rows(ranks.rank, ranks.world_size)
    engine = build_engine(options.make_options(model, WAYS["hybrid"]), ranks, total_steps=10)
    options.steps.train_step(engine, batch)
    save_checkpoint(folder, {"actor": engine}, {})
    found = [options.steps.train_step(engine, batch)]
    for changes in (WAYS["hybrid"], WAYS["plain"]):
        again = build_engine(options.make_options(model, changes), ranks, total_steps=10)
        load_checkpoint(folder, {"actor": again})
        found.append(options.steps.train_step(again, batch))
    return found


def gathers_the_same_bits(engine: FSDPEngine) -> bool:
    """Compare weights that were cast, then gathered in small buckets, with the reverse."""
    found = dict(FullTensors(engine.model, torch.bfloat16, engine.ranks.device, bucket_bytes=5000))
    expected = {name: full_tensor(p.detach()).bfloat16() for name, p in engine.model.named_parameters()}
    assert list(found) == list(expected)
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def main(model: str, checkpoint: str) -> object:
    ranks = join_ranks("cpu")
    found: dict[str, object] = {way: train(ranks, model, changes) for way, changes in WAYS.items()}
    found["resumed"] = resumed(ranks, model, checkpoint)
    return found
