"""Ranks that share the tokens of the same rows, against one rank.

Losses of complete rows, gradients, scores.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_core.engine.model import load_model
from areal_core.engine.ranks import Ranks, join_ranks
from areal_core.engine.sequence_parallel import check_heads
from areal_core.errors import RanksError
from areal_core.testing import make_tiny_family
from tests.engine import sequence_parallel_program as program

PROGRAM = Path(__file__).parent / "sequence_parallel_program.py"

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5  # relative, in float32


def rank_of(rank: int, world_size: int, sequence: int, tensor: int) -> Ranks:
    return Ranks(rank, world_size, torch.device("cpu"), None, sequence, tensor)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_tiny_family(folder / "gemma3_text", "gemma3_text", sliding_window=6)
    make_tiny_family(folder / "llama", "llama", num_key_value_heads=1)
    return folder


def assert_steps_of_one_rank(ranks, folder, output, seen):
    assert set(seen["repeats"].values()) == {True}
    for case in program.CASES:
        loss, gradients = program.take_step(ranks, folder, case)
        assert seen["losses"][case] == pytest.approx([loss] * len(seen["losses"][case]), rel=LOSS_TOLERANCE)
        shared = load_file(output / f"{case}.safetensors")
        assert shared.keys() == gradients.keys()
        for name, gradient in gradients.items():
            apart = float((shared[name] - gradient).norm() / gradient.norm())
            assert apart < GRADIENT_TOLERANCE, f"{case} {name}"


@pytest.fixture(scope="module")
def two_ranks(torchrun, folder, tmp_path_factory):
    """Results of two ranks for the same rows, and the path of their gradients."""
    output = tmp_path_factory.mktemp("gradients")
    return torchrun(PROGRAM, 2, folder, 2, output), output


@pytest.mark.long
def test_two_ranks_that_share_rows_take_the_step_of_one_and_repeat_it_to_the_bit(ranks, folder, two_ranks):
    seen, output = two_ranks
    assert_steps_of_one_rank(ranks, folder, output, seen)


@pytest.mark.long
def test_two_ranks_that_share_rows_score_as_one_does(ranks, folder, two_ranks):
    seen, _ = two_ranks
    batch = program.rows()
    trained = batch["loss_mask"].bool()
    scored = program.make_engine(ranks, folder, "preference").score(batch)
    for column, expected in zip(seen["scored"], scored, strict=True):
        torch.testing.assert_close(torch.tensor(column), expected, rtol=0, atol=2e-6)
        assert (torch.tensor(column)[~trained] == 0).all()
    values = program.make_engine(ranks, folder, "scores").compute_values(batch)
    torch.testing.assert_close(torch.tensor(seen["values"]), values, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("sequence_parallel", [2, 4])
def test_four_ranks_that_share_rows_take_the_step_of_one(
    ranks, folder, torchrun, tmp_path, sequence_parallel
):
    seen = torchrun(PROGRAM, 4, folder, sequence_parallel, tmp_path, timeout_s=300)
    assert_steps_of_one_rank(ranks, folder, tmp_path, seen)


def test_eight_ranks_are_numbered_with_tensor_parallelism_innermost():
    ranks = [rank_of(rank, 8, sequence=2, tensor=2) for rank in range(8)]
    assert [r.data_parallel_rank for r in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [r.sequence_parallel_rank for r in ranks] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [r.rank for r in ranks if r.is_group_leader] == [0, 4]
    assert {(r.data_parallel_size, r.model_parallel_size) for r in ranks} == {(2, 4)}


def test_heads_that_ranks_cannot_share_are_refused(folder):
    config = load_model(str(folder / "llama")).config
    check_heads(config, 2, 2)
    with pytest.raises(RanksError, match=r"has 4 attention heads, which c3 x t1 ranks cannot share"):
        check_heads(config, 3, 1)


def test_ranks_that_do_not_form_groups_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RanksError, match=r"3 rank\(s\) cannot be divided into groups of c2 x t1"):
        join_ranks("cpu", sequence_parallel=2)
