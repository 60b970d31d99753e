"""Results of pairs of tensor-parallel ranks, for a test that compares them with one rank.

Arguments: a folder with one model per family and a checkpoint of one rank called `one`; the family
of the checkpoint. Writes the gradients of each model into its folder, a checkpoint `two` and a
Hugging Face folder `hf` next to `one`. Prints the other results.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

from areal_core.data.batch import Batch
from areal_core.engine.checkpoint.distributed import load_checkpoint, save_checkpoint
from areal_core.engine.checkpoint.hf_folder import save_hf
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.logits import LogitMap
from areal_core.engine.logprobs import ChunkedLogprobs, VocabularyShard
from areal_core.engine.ranks import Ranks, join_ranks
from areal_core.engine.scores import load_score_model
from areal_core.engine.sharding import shard_model
from areal_core.testing import step_with_gradients
from tests.engine import steps_program as program

VOCABULARY, SHARD_SIZE = 23, 12
MAX_TOKENS = 30


def main(place: str, family: str) -> object:
    folder, ranks = Path(place), join_ranks("cpu", tensor_parallel=2)
    group, part = ranks.tensor_mesh.get_group(), ranks.tensor_mesh.get_local_rank()
    seen = {
        "vocabulary": {
            f"{temperature} {softcap}": vocabulary_differences(part, group, temperature, softcap)
            for temperature in (1.0, 0.7)
            for softcap in (None, 5.0)
        },
        "steps": {path.parent.name: one_step(ranks, path.parent) for path in folder.glob("*/config.json")},
        "scores": score_step(ranks, folder / family),
        "checkpoints": checkpoints(ranks, folder, family),
    }
    return ranks.gather_objects(seen)


def vocabulary_differences(
    part: int, group: torch.distributed.ProcessGroup, temperature: float, softcap: float | None
) -> list[float]:
    """Compare a shard of the vocabulary with the complete one.

    Returns the differences, relative to the largest number, of result and gradients of hidden and
    weight.
    """
    torch.manual_seed(1)
    hidden, weight = torch.randn(1, 10, 6), 3 * torch.randn(VOCABULARY, 6)
    labels, upstream = torch.randint(VOCABULARY, (10,)), torch.randn(1, 10, 2)
    mine = slice(SHARD_SIZE * part, SHARD_SIZE * (part + 1))

    def run(weight: torch.Tensor, part: VocabularyShard | None) -> list[torch.Tensor]:
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        result = ChunkedLogprobs.apply(*inputs, None, labels, temperature, LogitMap(softcap=softcap), part)
        return [result.detach(), *torch.autograd.grad(result, inputs, upstream)]

    expected = run(weight, None)
    got = run(weight[mine], VocabularyShard(mine.start, group))
    expected[2] = expected[2][mine]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True)]


def rows_of(ranks: Ranks) -> Batch:
    return program.rows(ranks.data_parallel_rank, ranks.data_parallel_size)


def one_step(ranks: Ranks, model: Path) -> dict:
    """Return checksums before and after one step in several micro-batches, and its loss and norm.

    Rank 0 writes the gradients to a file.
    """
    engine = program.make_engine(ranks, str(model), MAX_TOKENS)
    untrained = engine.checksums()
    experts = record_experts(engine)
    result, gradients = step_with_gradients(engine, rows_of(ranks))
    if ranks.rank == 0:
        save_file(gradients, model / "gradients.safetensors")
    return {
        "untrained": untrained,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "trained": engine.checksums(),
        "experts": experts,
    }


def score_step(ranks: Ranks, model: Path) -> list[float]:
    """Return loss and gradient norm of a reward model read by rank 0 alone, with checkpointing."""
    scored = load_score_model(str(model))
    torch.nn.init.constant_(scored.score.weight, 0.1)
    sharded = shard_model(
        scored, ranks, dtype=torch.float32, gradient_checkpointing=True, from_rank_0=ranks.world_size > 1
    )
    engine = program.engine_of(sharded, ranks, MAX_TOKENS)
    result = engine.train_batch(
        rows_of(ranks),
        lambda scores, flat: (scores**2 * flat["loss_mask"]).sum(),
        lambda part: part["loss_mask"].sum(),
    )
    return [result.loss, result.grad_norm]


def record_experts(engine: FSDPEngine) -> list[list[list[int]]]:
    """Return a list that grows by the experts of each token at each pass through a router."""
    chosen: list[list[list[int]]] = []
    for module in engine.model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(
                lambda _, inputs, output: chosen.append(output[2].sort(1).values.tolist())
            )
    return chosen


def checkpoints(ranks: Ranks, folder: Path, family: str) -> dict:
    engine = program.make_engine(ranks, str(folder / family), MAX_TOKENS)
    load_checkpoint(folder / "one", {"actor": engine})
    seen = {"loaded": engine.checksums(), "next": program.train_step(engine, rows_of(ranks))}
    save_checkpoint(folder / "two", {"actor": engine}, {})
    save_hf(folder / "hf", engine)
    return seen
