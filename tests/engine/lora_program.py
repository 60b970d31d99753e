"""Train an adapter for three steps on fixed rows, divided over the ranks; print the results.

Arguments: model folder, folder to save the adapter in. It trains twice: with the model read by each
rank, and by rank 0 for all.
"""

import torch

from areal_core.config.train_engine import FSDPEngineConfig, OptimizerConfig, TrainEngineConfig
from areal_core.engine.checkpoint.hf_folder import save_hf
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.ranks import Ranks, join_ranks
from areal_core.trainer.build import build_engine
from tests.engine.steps_program import rows, train_step


def options_of(model: str, **changes: object) -> TrainEngineConfig:
    options = {"dtype": "float32", "use_lora": True, "lora_rank": 4, "lora_alpha": 8} | changes
    return TrainEngineConfig(path=model, optimizer=OptimizerConfig(lr=1e-2), **options)


def train(ranks: Ranks, model: str, **changes: object) -> tuple[FSDPEngine, list[dict]]:
    """Take three steps; return the engine and the result of each."""
    torch.manual_seed(7)  # seeds the adapter's random numbers
    engine = build_engine(options_of(model, **changes), ranks, 10)
    batch = rows(ranks.rank, ranks.world_size)
    return engine, [train_step(engine, batch) for _ in range(3)]


def main(model: str, folder: str) -> object:
    ranks = join_ranks("cpu")
    engine, steps = train(ranks, model, gradient_checkpointing=True)
    save_hf(folder, engine)
    _, from_rank_0 = train(ranks, model, fsdp=FSDPEngineConfig(memory_efficient_load=True))
    return {"steps": steps, "from_rank_0": from_rank_0}
