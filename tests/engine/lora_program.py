"""Train an adapter for three steps on fixed rows, divided over the ranks; print the results.

Arguments: model folder, folder to save the adapter in. It trains twice: with the model read by each
rank, and by rank 0 for all.
"""

import json
import sys

import torch

from areal_core.config.train_engine import FSDPEngineConfig, OptimizerConfig, TrainEngineConfig
from areal_core.data.batch import Batch
from areal_core.engine.checkpoint.hf_folder import save_hf
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.ranks import Ranks, join_ranks, leave_ranks
from areal_core.trainer.build import build_engine

LENGTHS = [12, 5, 20, 9, 3]


def options_of(model: str, **changes: object) -> TrainEngineConfig:
    """Return the options of an adapter of rank 4 in float32."""
    options = {"dtype": "float32", "use_lora": True, "lora_rank": 4, "lora_alpha": 8} | changes
    return TrainEngineConfig(path=model, optimizer=OptimizerConfig(lr=1e-2), **options)


def rows(rank: int = 0, world_size: int = 1) -> Batch:
    """Return every world_size-th of five rows of different lengths, next-token aligned."""
    lengths = torch.tensor(LENGTHS)[:, None]
    mask = torch.arange(max(LENGTHS)) < lengths
    ids = torch.randint(5, 100, mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    trained = torch.arange(max(LENGTHS)) < lengths - 1
    batch = {"input_ids": ids * mask, "attention_mask": mask, "loss_mask": trained.int()}
    return {key: tensor[rank::world_size] for key, tensor in batch.items()}


def train_step(engine: FSDPEngine, batch: Batch) -> dict:
    """Take one step of maximum likelihood."""
    result = engine.train_batch(
        batch,
        lambda logprobs, entropy, flat: -(logprobs * flat["loss_mask"]).sum(),
        lambda part: part["loss_mask"].sum(),
    )
    engine.step_schedule()
    return {"loss": result.loss, "grad_norm": result.grad_norm, "checksums": engine.checksums()}


def train(ranks: Ranks, model: str, **changes: object) -> tuple[FSDPEngine, list[dict]]:
    """Take three steps; return the engine and the result of each."""
    torch.manual_seed(7)  # seeds the adapter's random numbers
    engine = build_engine(options_of(model, **changes), ranks, 10)
    batch = rows(ranks.rank, ranks.world_size)
    return engine, [train_step(engine, batch) for _ in range(3)]


def main(model: str, folder: str) -> None:
    ranks = join_ranks("cpu")
    engine, steps = train(ranks, model, gradient_checkpointing=True)
    save_hf(folder, engine)
    _, from_rank_0 = train(ranks, model, fsdp=FSDPEngineConfig(memory_efficient_load=True))
    if ranks.rank == 0:
        print(json.dumps({"steps": steps, "from_rank_0": from_rank_0}))
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
