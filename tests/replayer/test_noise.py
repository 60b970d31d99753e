"""Judging a difference against the machine's noise floor."""

import math
from dataclasses import replace

import pytest

from recorder.testing import SCRIPTED_HEADER
from replayer.noise import (
    ROUNDING,
    Guarantee,
    expected_guarantee,
    judge_by_noise,
    judge_statistically,
    noise_floor,
    t_value,
)

HEADER = replace(
    SCRIPTED_HEADER,
    config={"deterministic": True, "actor": {"ppo_n_minibatches": 1}},
    environment={"cpu": "A", "libraries": {"torch": "2", "areal-debug": "1"}, "code": {"commit": "a"}},
)


def run(*losses, name="loss"):
    return {step: {name: loss} for step, loss in enumerate(losses)}


def test_the_same_shape_on_the_same_machine_guarantees_bits_whatever_our_own_code_is():
    other_code = {"cpu": "A", "libraries": {"torch": "2", "areal-debug": "2"}, "code": {"commit": "b"}}
    assert expected_guarantee(HEADER, HEADER) == Guarantee("bitwise")
    assert expected_guarantee(HEADER, replace(HEADER, environment=other_code)) == Guarantee("bitwise")


def test_other_ranks_guarantee_noise_unless_minibatches_are_redistributed():
    two = replace(HEADER, num_ranks=2)
    assert expected_guarantee(HEADER, two) == Guarantee("noise", ("2 ranks, recorded with 1",))
    config = {"deterministic": True, "actor": {"ppo_n_minibatches": 4}}
    with_minibatches = replace(HEADER, config=config)
    found = expected_guarantee(with_minibatches, replace(with_minibatches, num_ranks=2))
    assert found.kind == "statistical"
    assert "4 minibatches" in found.reasons[-1]


def test_the_noise_floor_is_never_below_rounding_and_is_shared_by_related_statistics():
    noise = noise_floor({0: {"x/avg": 2.0, "x/max": 8.0}}, [{0: {"x/avg": 2.0, "x/max": 8.5}}])
    assert noise == {0: {"x/avg": 0.5, "x/max": 0.5}}
    assert noise_floor(run(4.0), [run(4.0)]) == run(4.0 * ROUNDING)


def test_rounding_is_relative_to_the_numbers_of_which_a_statistic_is_a_difference_or_a_sum():
    stats = {
        "x/approx_kl/avg": 0.0,
        "x/importance_weight/min": 1.0,
        "x/loss": 0.001,
        "x/actor_loss/avg": 0.002,
        "x/actor_loss/min": -3.0,
        "y/critic_loss/max": 100.0,  # of another model
        "x/new_logp/min": -4.0,
        "x/advantages/avg": 1e-9,
        "x/advantages/max": 2.0,
    }
    noise = noise_floor({0: stats}, [{0: stats}])[0]
    assert noise["x/approx_kl/avg"] == noise["x/importance_weight/min"] == 4.0 * ROUNDING
    assert noise["x/loss"] == 3.0 * ROUNDING
    assert noise["x/advantages/avg"] == 2.0 * ROUNDING


@pytest.mark.parametrize(("apart", "finding"), [(0.02, "within"), (0.5, "unclear"), (2.0, "different")])
def test_the_verdict_is_in_noise_floors_at_the_worst_step(apart, finding):
    verdict = judge_by_noise(run(1.0, 1.0), run(1.0, 1.0 + apart), run(0.01, 0.01))
    assert (verdict.finding, verdict.step, verdict.where) == (finding, 1, "loss")
    assert verdict.k == pytest.approx(apart / 0.01)
    assert verdict.exit_code == {"within": 0, "unclear": 2, "different": 1}[finding]


def test_statistics_need_five_steps_and_see_a_shift():
    noisy = [0.1, -0.2, 0.15, -0.05, 0.02, -0.1]
    record = run(*[1.0] * 6)
    around = run(*[1.0 + n for n in noisy])
    shifted = run(*[2.0 + n for n in noisy])
    assert judge_statistically(record, around).finding == "within"
    assert judge_statistically(record, shifted).finding == "unclear"
    assert judge_statistically(run(1.0), run(1.0)).finding == "unclear"
    assert t_value([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(3 / math.sqrt(2.5 / 5))
