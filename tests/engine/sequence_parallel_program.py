"""One step of three losses that need complete rows, on ranks that share the tokens of the rows.

For a test that compares with one rank. Arguments: a folder with models called gemma3_text and llama
(which has one key-value head), number of sequence-parallel ranks, and output file of rank 0 for the
gradients. Prints the loss of each case on rank 0 and on the other ranks.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from areal_core.algorithm.losses import dpo_loss, policy_loss, reward_model_loss
from areal_core.data.batch import Batch
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.model import load_model
from areal_core.engine.ranks import Ranks, join_ranks
from areal_core.engine.scores import load_score_model
from areal_core.testing import step_with_gradients
from tests.engine import steps_program as steps

MAX_TOKENS = 36  # of a micro-batch: pairs of the lengths below need three
LENGTHS = [12, 5, 21, 9, 3, 14, 7, 7]
PROMPT = 8  # tokens outside the loss mask, so that some slices have none inside


def rows(rank: int = 0, num_ranks: int = 1) -> Batch:
    """Return this data-parallel rank's pairs of eight rows."""
    lengths, position = torch.tensor(LENGTHS)[:, None], torch.arange(max(LENGTHS))
    mask = position < lengths
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 100, mask.shape, generator=generator, dtype=torch.int32) * mask
    trained = (position < lengths - 1) & ((position >= PROMPT) | (lengths <= PROMPT))
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "loss_mask": trained.int(),
        "advantages": torch.randn(mask.shape, generator=generator),
        "old_logp": -4 + 0.1 * torch.randn(mask.shape, generator=generator),
    }
    mine = [row for row in range(len(LENGTHS)) if row // 2 % num_ranks == rank]
    return {key: tensor[mine] for key, tensor in batch.items()}


def sequence_level_policy_loss(logprobs: Tensor, entropy: Tensor, flat: Batch) -> Tensor:
    masked = logprobs, flat["old_logp"], flat["advantages"], flat["loss_mask"].bool(), flat["cu_seqlens"]
    return policy_loss(*masked, eps_clip=10.0, level="sequence")[0].sum()


def preference_loss(logprobs: Tensor, entropy: Tensor, flat: Batch) -> Tensor:
    return dpo_loss(logprobs, flat["old_logp"], flat["loss_mask"], flat["cu_seqlens"])[0]


def pairwise_loss(scores: Tensor, flat: Batch) -> Tensor:
    return reward_model_loss(scores, flat["cu_seqlens"])[0]


def load_recomputing(path: str, **options: object) -> torch.nn.Module:
    """Load a model whose backward recomputes each layer, and so its exchanges."""
    model = load_model(path, **options)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def load_with_scores(path: str, **options: object) -> torch.nn.Module:
    """Load a reward model with a random head: with a head of 0 all other gradients would be 0."""
    model = load_score_model(path, **options)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    return model


# name of a case -> folder of its model, its loader, its loss
CASES: dict[str, tuple[str, Callable, Callable]] = {
    "policy": ("gemma3_text", load_recomputing, sequence_level_policy_loss),
    "preference": ("llama", load_model, preference_loss),
    "scores": ("llama", load_with_scores, pairwise_loss),
}


def make_engine(ranks: Ranks, folder: Path, case: str) -> FSDPEngine:
    model, load, _ = CASES[case]
    engine = steps.make_engine(ranks, str(folder / model), MAX_TOKENS, load=load)
    engine.granularity = 2
    return engine


def take_step(ranks: Ranks, folder: Path, case: str) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of one step and its gathered gradients."""
    batch = rows(ranks.data_parallel_rank, ranks.data_parallel_size)
    engine = make_engine(ranks, folder, case)
    result, gradients = step_with_gradients(engine, batch, CASES[case][2])
    return result.loss, gradients


def main(folder: str, sequence_parallel: str, output: str) -> object:
    ranks = join_ranks("cpu", sequence_parallel=int(sequence_parallel))
    losses, repeats = {}, {}
    for case in CASES:
        loss, gradients = take_step(ranks, Path(folder), case)
        again = take_step(ranks, Path(folder), case)
        repeats[case] = loss == again[0] and all(torch.equal(g, again[1][n]) for n, g in gradients.items())
        losses[case] = ranks.gather_objects(loss)
        if ranks.rank == 0:
            save_file(gradients, Path(output) / f"{case}.safetensors")
    return {"losses": losses, "repeats": repeats}
