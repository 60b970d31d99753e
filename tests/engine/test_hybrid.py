"""Four ranks: weights sharded over all or over pairs of them, read once, gathered in few bytes."""

from pathlib import Path

import pytest

from tests.engine.steps_program import assert_same_steps

PROGRAM = Path(__file__).parent / "hybrid_program.py"


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def four_ranks(torchrun, tiny_model, tmp_path_factory):
    return torchrun(PROGRAM, 4, tiny_model, tmp_path_factory.mktemp("hybrid") / "000001")


@pytest.mark.parametrize("way", ["hybrid", "one sum", "both"])
def test_other_ways_to_share_weights_and_gradients_give_the_plain_result(four_ranks, way):
    plain, other = four_ranks["plain"], four_ranks[way]
    assert_same_steps(other["steps"], plain["steps"])
    assert other["weights"] == pytest.approx(plain["weights"], rel=1e-4)


def test_pairs_of_ranks_share_a_copy_of_the_weights(four_ranks):
    # 105 rows of the embedding
    assert four_ranks["plain"]["rows"] == [27, 27, 27, 24]
    assert four_ranks["hybrid"]["rows"] == [53, 52, 53, 52]


def test_a_checkpoint_of_copied_weights_continues_with_and_without_copies(four_ranks):
    straight, hybrid, plain = four_ranks["resumed"]
    assert hybrid == straight
    assert_same_steps([plain], [straight])


@pytest.mark.parametrize("way", ["plain", "hybrid"])
def test_weights_are_cast_before_they_are_gathered_with_the_same_bits(four_ranks, way):
    assert four_ranks[way]["same_gather"]
