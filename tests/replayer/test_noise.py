"""What a difference is worth beside the machine's own noise."""

import math
from dataclasses import replace

import pytest

from recorder.difference import Difference
from recorder.testing import SCRIPTED_HEADER
from replayer.noise import (
    ROUNDING,
    Promise,
    judge,
    judge_statistically,
    own_noise,
    promise,
    smooth,
    t_value,
)

HEADER = replace(
    SCRIPTED_HEADER,
    config={"deterministic": True, "actor": {"ppo_n_minibatches": 1}},
    environment={"cpu": "A", "libraries": {"torch": "2", "areal-debug": "1"}, "code": {"commit": "a"}},
)


def run(*losses, name="loss"):
    return {step: {name: loss} for step, loss in enumerate(losses)}


def test_the_same_shape_on_the_same_machine_promises_bits_whatever_our_own_code_is():
    other_code = {"cpu": "A", "libraries": {"torch": "2", "areal-debug": "2"}, "code": {"commit": "b"}}
    assert promise(HEADER, HEADER) == Promise("bitwise")
    assert promise(HEADER, replace(HEADER, environment=other_code)) == Promise("bitwise")


def test_another_processor_promises_noise_and_says_why():
    other = replace(HEADER, environment=HEADER.environment | {"cpu": "B"})
    assert promise(HEADER, other) == Promise("noise", ("cpu: B, recorded A",))


def test_other_ranks_promise_noise_unless_minibatches_are_dealt_anew():
    two = replace(HEADER, num_ranks=2)
    assert promise(HEADER, two) == Promise("noise", ("2 ranks, recorded with 1",))
    config = {"deterministic": True, "actor": {"ppo_n_minibatches": 4}}
    with_minibatches = replace(HEADER, config=config)
    found = promise(with_minibatches, replace(with_minibatches, num_ranks=2))
    assert found.kind == "statistical"
    assert "4 minibatches" in found.reasons[-1]


def test_other_micro_batches_promise_noise_and_another_learning_rate_nothing():
    division = Difference("actor.mb_spec.max_tokens_per_mb", 64, 32)
    assert promise(HEADER, HEADER, [division]).kind == "noise"
    found = promise(HEADER, HEADER, [division, Difference("actor.optimizer.lr", 1e-3, 2e-3)])
    assert found == Promise("changed", ("actor.optimizer.lr was set differently",))


def test_own_noise_is_the_most_that_own_runs_were_apart_so_far():
    noise = own_noise(run(1.0, 1.0, 1.0), [run(1.5, 1.25, 1.0), run(1.0, 1.0, 3.0)])
    assert [noise[step]["loss"] for step in range(3)] == [0.5, 0.5, 2.0]


def test_own_noise_is_never_below_rounding_and_is_shared_by_relatives():
    noise = own_noise({0: {"x/avg": 2.0, "x/max": 8.0}}, [{0: {"x/avg": 2.0, "x/max": 8.5}}])
    assert noise == {0: {"x/avg": 0.5, "x/max": 0.5}}
    assert own_noise(run(4.0), [run(4.0)]) == run(4.0 * ROUNDING)


def test_rounding_of_a_divergence_is_that_of_the_logprobs_whose_difference_it_is():
    stats = {
        "x/approx_kl/avg": 0.0,
        "x/new_logp/min": -4.0,
        "x/advantages/avg": 1e-9,
        "x/advantages/max": 2.0,
    }
    noise = own_noise({0: stats}, [{0: stats}])[0]
    assert noise["x/approx_kl/avg"] == 4.0 * ROUNDING
    assert noise["x/advantages/avg"] == 2.0 * ROUNDING


@pytest.mark.parametrize(("apart", "finding"), [(0.02, "within"), (0.5, "unclear"), (2.0, "different")])
def test_the_verdict_counts_own_noises_at_the_worst_step(apart, finding):
    verdict = judge(run(1.0, 1.0), run(1.0, 1.0 + apart), run(0.01, 0.01))
    assert (verdict.finding, verdict.step, verdict.where) == (finding, 1, "loss")
    assert verdict.k == pytest.approx(apart / 0.01)
    assert verdict.exit_code == {"within": 0, "unclear": 2, "different": 1}[finding]


def test_nan_beside_nan_is_equal_and_nan_beside_a_number_is_different():
    noise = run(1.0)
    assert judge(run(math.nan), run(math.nan), noise).k == 0
    assert judge(run(1.0), run(math.nan), noise).finding == "different"


def test_nothing_in_common_is_never_green():
    assert judge(run(1.0), run(1.0, name="other"), run(1.0)).finding == "unclear"
    assert judge({}, {}, {}).finding == "unclear"


def test_a_count_that_one_token_moves_is_no_measure_of_noise():
    assert smooth({"a/clip_ratio/avg": 1, "lr__count": 2, "timeperf/x": 3, "loss": 4}) == {"loss": 4}


def test_statistics_need_five_steps_and_see_a_shift():
    noisy = [0.1, -0.2, 0.15, -0.05, 0.02, -0.1]
    record = run(*[1.0] * 6)
    around = run(*[1.0 + n for n in noisy])
    shifted = run(*[2.0 + n for n in noisy])
    assert judge_statistically(record, around).finding == "within"
    assert judge_statistically(record, shifted).finding == "unclear"
    assert judge_statistically(run(1.0), run(1.0)).finding == "unclear"
    assert t_value([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(3 / math.sqrt(2.5 / 5))
