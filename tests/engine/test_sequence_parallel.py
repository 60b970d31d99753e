"""Ranks that share the tokens of the same rows, against one rank.

Losses of complete rows, gradients, scores.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from areal_core.testing import make_tiny_family
from tests.engine import sequence_parallel_program as program
from tests.engine.steps_program import assert_same_gradients

PROGRAM = Path(__file__).parent / "sequence_parallel_program.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_tiny_family(folder / "gemma3_text", "gemma3_text", sliding_window=6)
    make_tiny_family(folder / "llama", "llama", num_key_value_heads=1)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_rows_take_the_step_of_one_and_repeat_it_to_the_bit(
    ranks, folder, torchrun, tmp_path, num_ranks
):
    seen = torchrun(PROGRAM, num_ranks, folder, num_ranks, tmp_path, timeout_s=300)
    assert set(seen["repeats"].values()) == {True}
    for case in program.CASES:
        loss, gradients = program.take_step(ranks, folder, case)
        assert seen["losses"][case] == pytest.approx([loss] * num_ranks, rel=1e-6)
        assert_same_gradients(load_file(tmp_path / f"{case}.safetensors"), gradients)
