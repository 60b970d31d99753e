"""Training on pairs: they stay together, and two ranks learn what one does."""

from pathlib import Path

import pytest
import torch

from areal_core.engine.ranks import Ranks
from areal_core.trainer import supervised
from areal_core.trainer.batches import pairs_to_batch


def test_each_validation_pair_goes_to_one_rank_in_equally_many_batches_on_each():
    pairs = [{"chosen_ids": [i]} for i in range(5)]
    batches_of_ranks = [
        supervised.shard_batches(pairs, 4, Ranks(rank, 2, torch.device("cpu"), None)) for rank in range(2)
    ]
    assert [[pair["chosen_ids"][0] for pair in batch] for batch in batches_of_ranks[0]] == [[0, 2], [4]]
    assert [[pair["chosen_ids"][0] for pair in batch] for batch in batches_of_ranks[1]] == [[1, 3], []]
    assert pairs_to_batch(batches_of_ranks[1][1])["input_ids"].shape[0] == 0


@pytest.mark.long
@pytest.mark.parametrize("method", ["dpo", "rw"])
def test_two_ranks_learn_and_measure_what_one_does(torchrun, tiny_model, tmp_path, method):
    program = Path(__file__).with_name("preferences_program.py")
    one, two, sharing = (
        torchrun(program, count, method, tiny_model, tmp_path / sizes, sizes)
        for count, sizes in ((1, "d1"), (2, "d2"), (2, "d1c2"))
    )
    assert len(one) == 12
    assert two == pytest.approx(one, rel=1e-4)
    assert sharing == pytest.approx(one, rel=1e-4)
    assert one[-1] < 0.9 * one[0]
