"""Train under several ways of sharding, on all ranks; print losses, weights, timeouts, reads.

Arguments: model folder, and a folder for a checkpoint.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

from areal_core.engine.checkpoint.distributed import load_checkpoint, save_checkpoint
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.full_weights import FullTensors
from areal_core.engine.model import load_model
from areal_core.engine.ranks import TIMEOUT_VARIABLE, Ranks, join_ranks, leave_ranks
from areal_core.engine.sharding import full_tensor
from areal_core.trainer.build import build_engine
from tests.engine import options_program as options

TIMEOUT_S = 1234.0
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
        "losses": [step["loss"] for step in found],
        "norms": [step["grad_norm"] for step in found],
        "checksums": found[-1]["checksums"],
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


def read_by(ranks: Ranks, model: str) -> list[bool]:
    """Return which ranks read the model's files."""
    reads = []

    def load(path: str, *, without_weights: bool, **arguments: object) -> torch.nn.Module:
        reads.append(not without_weights)
        return load_model(path, without_weights=without_weights, **arguments)

    build_engine(options.make_options(model, {}), ranks, total_steps=1, load=load)
    return ranks.gather_objects(reads[0])


def timeouts_s(ranks: Ranks) -> list[float]:
    """Return the timeout of every group of this process."""
    meshes = (ranks.meshes.all, ranks.shard_mesh, ranks.replicated_shards(2))
    groups = [dist.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())]
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in (*groups, ranks.meshes.same_rows)
        if group is not None
    ]


def main(model: str, checkpoint: str) -> None:
    torch.set_num_threads(1)
    os.environ[TIMEOUT_VARIABLE] = str(TIMEOUT_S)
    ranks = join_ranks("cpu")
    found: dict[str, object] = {way: train(ranks, model, changes) for way, changes in WAYS.items()}
    found["resumed"] = resumed(ranks, model, checkpoint)
    found |= {"timeouts": timeouts_s(ranks), "read_by": read_by(ranks, model)}
    if ranks.rank == 0:
        print(json.dumps(found))
    leave_ranks()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
