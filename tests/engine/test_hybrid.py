"""Four ranks: weights sharded over all or over pairs of them, read once, gathered in few bytes."""

from pathlib import Path

import pytest

from tests.engine.steps_program import assert_same_steps

PROGRAM = Path(__file__).parent / "hybrid_program.py"

pytestmark = pytest.mark.long


def test_other_ways_to_share_weights_and_gradients_give_the_plain_result(torchrun, tiny_model, tmp_path):
    found = torchrun(PROGRAM, 4, tiny_model, tmp_path / "000001")
    plain = found["plain"]
    for way in ("hybrid", "one sum", "both"):
        assert_same_steps(found[way]["steps"], plain["steps"])
        assert found[way]["weights"] == pytest.approx(plain["weights"], rel=1e-4)
    # 105 rows of the embedding; pairs of ranks share a copy
    assert plain["rows"] == [27, 27, 27, 24]
    assert found["hybrid"]["rows"] == [53, 52, 53, 52]
    # weights are cast before they are gathered
    assert (plain["same_gather"], found["hybrid"]["same_gather"]) == (True, True)
    # a checkpoint of copied weights continues with and without copies
    straight, hybrid, without = found["resumed"]
    assert hybrid == straight
    assert_same_steps([without], [straight])
