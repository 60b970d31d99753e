"""One step with replayed experts, on ranks that divide rows, tokens or layers.

Arguments: model folder, file of a batch, and "sequence", "tensor" or "data". Prints loss and norms
of gradients. Also what test_routing.py uses in its own process.
"""

from pathlib import Path

import torch
from torch import Tensor

from areal_core.algorithm.alignment import to_next_token
from areal_core.data.batch import Batch, select_rows
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.model import load_model
from areal_core.engine.ranks import Ranks, join_ranks
from areal_core.engine.routers import Routers
from areal_core.engine.sharding import shard_model
from areal_core.testing import step_with_gradients
from tests.engine.steps_program import engine_of

MAX_TOKENS = 50  # of a micro-batch


def make_engine(
    ranks: Ranks, folder: Path | str, *, replays: bool = True, recomputes: bool = False
) -> FSDPEngine:
    model = load_model(str(folder), dtype=torch.float32)
    sharded = shard_model(model, ranks, dtype=torch.float32, gradient_checkpointing=recomputes)
    return engine_of(sharded, ranks, MAX_TOKENS, routers=Routers(sharded) if replays else None)


def perturbed(folder: Path, output: Path) -> Path:
    """Write a copy of a model whose routers have other weights."""
    model = load_model(str(folder), dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(output)
    return output


@torch.no_grad()
def logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


def main(folder: str, file: str, split: str) -> object:
    sizes = {} if split == "data" else {f"{split}_parallel": 2}
    ranks = join_ranks("cpu", **sizes)
    batch: Batch = torch.load(file, weights_only=True)
    rows = range(ranks.data_parallel_rank, len(batch["input_ids"]), ranks.data_parallel_size)
    result, gradients = step_with_gradients(
        make_engine(ranks, folder), to_next_token(select_rows(batch, rows))
    )
    return {"loss": result.loss, "gradients": {n: float(g.norm()) for n, g in gradients.items()}}
