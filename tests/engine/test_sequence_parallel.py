"""Ranks that share the tokens of the same rows, against one rank.

Losses of complete rows, gradients, scores.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from areal_core.testing import make_tiny_family
from tests.engine import sequence_parallel_program as program

PROGRAM = Path(__file__).parent / "sequence_parallel_program.py"

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5  # relative, in float32


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
@pytest.mark.parametrize("sequence_parallel", [2, 4])
def test_four_ranks_that_share_rows_take_the_step_of_one(
    ranks, folder, torchrun, tmp_path, sequence_parallel
):
    seen = torchrun(PROGRAM, 4, folder, sequence_parallel, tmp_path, timeout_s=300)
    assert_steps_of_one_rank(ranks, folder, tmp_path, seen)
