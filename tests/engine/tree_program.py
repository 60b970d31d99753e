"""One step on rows that share tokens, as a tree, on several ranks.

For a test that compares with one rank and packed rows. Arguments: model folder, number of sequence-
and of tensor-parallel ranks, output file of rank 0 for the gradients. Prints the loss, the scores
and the tokens that each rank computed.
"""

import torch
from safetensors.torch import save_file

from areal_core.data.batch import Batch
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.ranks import Ranks, join_ranks
from areal_core.testing import step_with_gradients
from tests.engine import steps_program as steps

PROMPTS = (17, 9, 21)
SAMPLES = 3
MAX_TOKENS = 110  # of a micro-batch


def rows(rank: int = 0, num_ranks: int = 1) -> Batch:
    """Return the samples of this rank's prompts, next-token aligned; prompts are not trained on.

    Two samples of each prompt have their first completion tokens in common, and one sample of the
    last prompt is there twice.
    """
    generator = torch.Generator().manual_seed(0)
    draw = lambda count: torch.randint(5, 100, (count,), generator=generator).tolist()  # noqa: E731
    found: list[tuple[int, int, list[int]]] = []
    for prompt, length in enumerate(PROMPTS):
        begin, shared = draw(length), draw(2)
        tails = [shared + draw(3), shared + draw(1), draw(6)]
        found += [(prompt, length, begin + tail) for tail in tails]
    found.append(found[-1])
    mine = [row for row in found if row[0] % num_ranks == rank]
    lengths = torch.tensor([len(tokens) for _, _, tokens in mine])
    position = torch.arange(int(lengths.max()))
    ids = torch.zeros(len(mine), len(position), dtype=torch.int32)
    for place, (_, _, tokens) in enumerate(mine):
        ids[place, : len(tokens)] = torch.tensor(tokens)
    starts = torch.tensor([length - 1 for _, length, _ in mine])[:, None]
    trained = (position >= starts) & (position < lengths[:, None] - 1)
    return {
        "input_ids": ids,
        "attention_mask": position < lengths[:, None],
        "loss_mask": trained.int(),
        "prompt_id": torch.tensor([prompt for prompt, _, _ in mine]),
    }


def make_engine(ranks: Ranks, model: str, shares_prefixes: bool) -> FSDPEngine:
    engine = steps.make_engine(ranks, model, MAX_TOKENS)
    engine.shares_prefixes = shares_prefixes
    return engine


def main(model: str, sequence_parallel: str, tensor_parallel: str, output: str) -> object:
    sizes = {"sequence_parallel": int(sequence_parallel), "tensor_parallel": int(tensor_parallel)}
    ranks = join_ranks("cpu", **sizes)
    batch = rows(ranks.data_parallel_rank, ranks.data_parallel_size)
    engine = make_engine(ranks, model, True)
    scored = [column.tolist() for column in engine.score(batch)]
    result, gradients = step_with_gradients(engine, batch)
    again, same = step_with_gradients(make_engine(ranks, model, True), batch)
    repeats = result.loss == again.loss and all(torch.equal(g, same[name]) for name, g in gradients.items())
    computed = ranks.gather_objects([micro.num_computed for micro in result.micro_batches])
    if ranks.rank == 0:
        save_file(gradients, output)
    return {"loss": result.loss, "scored": scored, "repeats": repeats, "computed": computed}
