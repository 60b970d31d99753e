import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine import steps_program as program

PROGRAM = Path(__file__).parent / "steps_program.py"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def two_ranks(torchrun, tiny_model, tmp_path_factory):
    """Three steps on two ranks, and the last two again from a checkpoint."""
    return torchrun(PROGRAM, 2, tiny_model, 16 + 5, tmp_path_factory.mktemp("checkpoint") / "000001")


def run_alone(ranks, model, max_tokens, steps=3):
    engine = program.make_engine(ranks, str(model), max_tokens)
    return [program.train_step(engine, program.rows()) for _ in range(steps)]


def test_loss_and_gradient_do_not_depend_on_micro_batches(ranks, tiny_model):
    undivided, divided = run_alone(ranks, tiny_model, 1000), run_alone(ranks, tiny_model, 20)
    assert [step["num_micro_batches"] for step in undivided + divided] == [1, 1, 1, 3, 3, 3]
    program.assert_same_steps(divided, undivided)


def test_two_ranks_with_unequal_rows_train_as_one_does(ranks, tiny_model, two_ranks):
    # Rank 0 needs two micro-batches for its three rows, rank 1 one for its two and an empty one.
    alone = run_alone(ranks, tiny_model, 1000)
    program.assert_same_steps(two_ranks["straight"], alone)
    assert {step["num_micro_batches"] for step in two_ranks["straight"]} == {2}
    assert [step["lr"] for step in two_ranks["straight"]] == [step["lr"] for step in alone]


def test_training_continues_from_a_checkpoint_to_the_same_bits_on_two_ranks(two_ranks):
    assert two_ranks["state"] == {"steps_done": 1}
    assert two_ranks["resumed"] == two_ranks["straight"][1:]


def test_a_step_with_nothing_to_train_on_is_an_error(ranks, tiny_model):
    batch = program.rows()
    batch["loss_mask"].zero_()
    with pytest.raises(ValueError, match="every loss_mask is 0"):
        program.train_step(program.make_engine(ranks, str(tiny_model), 100), batch)


def test_an_update_with_an_infinite_loss_is_not_taken_though_its_gradient_is_finite(ranks, tiny_model):
    engine = program.make_engine(ranks, str(tiny_model), 20)
    before = engine.checksums()
    result = engine.train_batch(
        program.rows(),
        lambda logprobs, entropy, flat: logprobs.sum() + torch.tensor(torch.inf),
        lambda part: part["loss_mask"].sum(),
    )
    engine.step_schedule()  # without a warning of torch
    assert not result.update_successful
    assert 0 < result.grad_norm < torch.inf
    assert engine.checksums() == before


@pytest.mark.long
def test_every_split_over_ranks_agrees_with_one_rank(tmp_path):
    """The benchmark ends with 1 when a difference is no rounding, or a repeat has other bits."""
    table = tmp_path / "table.md"
    command = [sys.executable, "-m", "benchmarks.rank_splits", "--write", table]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [line for line in table.read_text().splitlines() if line.endswith("| yes |")]
    assert len(rows) == 2 * 8 * 2  # dtypes, splits, limits of a micro-batch
