"""Several ranks in one process: they take turns, and combine in rank order."""

import random

import pytest
import torch

from areal_core.engine.determinism import seed_everything
from areal_core.engine.gloo_order import chunk_size, pieces_of, pieces_of_shards, sum_as_gloo
from areal_core.engine.ranks import Ranks
from replayer.virtual_ranks import run_as_ranks

SUMMANDS = [1e8, 1.0, -1e8, 0.5]  # float32: 0.5 in this order, 1.5 in others


def run(ranks: Ranks, num_ranks, work):
    """Run `work(ranks)` as each rank; return the results in rank order."""
    found = {}

    def as_rank(join):
        own = join(None)
        found[own.rank] = work(own)

    run_as_ranks(num_ranks, lambda config: ranks, as_rank)
    return [found[rank] for rank in range(num_ranks)]


def test_collectives_give_every_rank_the_values_of_all_in_rank_order(ranks):
    def work(own):
        return own.gather_objects(own.rank * 10), own.maximum(own.rank), own.world_size, own.is_virtual

    assert run(ranks, 4, work) == [([0, 10, 20, 30], 3, 4, True)] * 4


def test_sums_are_taken_in_rank_order(ranks):
    found = run(ranks, 4, lambda own: own.sum(torch.tensor(SUMMANDS[own.rank])).item())
    assert found == [0.5] * 4


def test_the_ring_of_gloo_starts_each_chunk_one_rank_before_its_own():
    parts = [torch.full((13,), value) for value in SUMMANDS]
    assert pieces_of(13, 4, 4) == [(0, 0, 4), (1, 4, 8), (2, 8, 12), (3, 12, 13)]  # segments of 2 elements
    assert sum_as_gloo(parts).tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 4 + [0.5]
    assert chunk_size(5_000_000, 4, 4) == 5 * 250_000


def test_a_shard_knows_its_chunks_where_gloo_summed_padded_rows():
    shapes = [torch.Size([5, 2]), torch.Size([3])]  # padded to 4 x 2 and 4 elements: 4 x (4 + 1)
    assert pieces_of_shards(shapes, 4, 0, 1) == [
        [(0, 0, 4), (0, 4, 5), (1, 5, 8), (1, 8, 10)],
        [(0, 0, 1), (1, 1, 2), (2, 2, 3)],
    ]
    assert pieces_of_shards(shapes, 4, 1, 2) == [[(1, 0, 2), (1, 2, 4)], [(2, 0, 1)]]


def test_each_rank_has_random_numbers_of_its_own(ranks):
    def draw():
        return random.random(), torch.rand(()).item()

    def work(own):
        seed_everything(1, own.rank)
        found = []
        for _ in range(2):
            own.barrier()
            found.append(draw())
        return found

    def alone(rank):
        seed_everything(1, rank)
        return [draw(), draw()]

    assert run(ranks, 3, work) == [alone(rank) for rank in range(3)]


def test_an_error_of_one_rank_ends_all_of_them_and_is_raised(ranks):
    def work(own):
        own.barrier()
        if own.rank == 1:
            raise ValueError("rank 1 is broken")
        own.barrier()

    with pytest.raises(ValueError, match="rank 1 is broken"):
        run(ranks, 3, work)
