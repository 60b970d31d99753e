"""The sample that made a step is named, and shares add up to the step that was taken."""

import io
import math

import pytest
import torch
from rich.console import Console

from areal_debug.replay.report import report_of_explanation
from areal_debug.report.terminal import print_report
from replayer.explain import SampleShare, broken_update, explain
from tests.marks import late

from .conftest import train_and_record

SPIKE = (1, 9)  # step, row


def spike(batch, step):
    if step != SPIKE[0]:
        return batch
    rewards = batch["rewards"].clone()
    rewards[SPIKE[1]] = 30.0
    return batch | {"rewards": rewards}


@pytest.fixture(scope="module")
def spiked(tmp_path_factory, tiny_model):
    """Two steps, the last with an outlier reward, which no normalisation hides."""
    return train_and_record(
        tmp_path_factory.mktemp("spiked"),
        tiny_model,
        2,
        spike,
        actor__reward_norm=None,
        actor__adv_norm=None,
        actor__use_decoupled_loss=False,
    )


@pytest.fixture(scope="module")
def explanations(spiked):
    return {step: explain(spiked.path, step) for step in (0, SPIKE[0])}


def test_the_sample_that_made_the_spike_comes_first(explanations):
    found = explanations[SPIKE[0]]
    first = found.samples[0]
    assert (first.row, first.reward) == (SPIKE[1], 30.0)
    assert first.gradient_share > 0.9
    assert first.loss_share > 0.5
    assert len(found.samples) == 16


def test_shares_add_up_to_the_step_that_was_recorded(spiked, explanations):
    for step, found in explanations.items():
        recorded = spiked.record.step(step).plan(0).details["minibatches"]
        assert found.faithful
        for index, minibatch in enumerate(recorded):
            samples = [s for s in found.samples if s.minibatch == index]
            assert sorted(s.row for s in samples) == sorted(minibatch["rows"])
            assert sum(s.gradient_share for s in samples) == pytest.approx(1, abs=1e-4)
            assert sum(s.loss_share for s in samples) == pytest.approx(1)
            assert sum(s.loss for s in samples) == pytest.approx(float.fromhex(minibatch["loss"]), abs=1e-5)
            assert found.grad_norms[index] == pytest.approx(float.fromhex(minibatch["grad_norm"]), rel=1e-5)


def explained(run, step=0):
    """Explain a step; return the samples by row, and the first printed line."""
    found = explain(run.path, step)
    assert found.faithful
    out = Console(file=io.StringIO(), width=400)
    print_report(out, report_of_explanation(run.record, found.to_dict()))
    return found, {sample.row: sample for sample in found.samples}, out.file.getvalue().splitlines()[0]


def test_each_sample_without_a_gradient_has_its_reason(tmp_path, tiny_model):
    def silence(batch, step):
        rewards, mask, logprobs = (batch[name].clone() for name in ("rewards", "loss_mask", "logprobs"))
        rewards[4:8] = 0.5  # a group
        mask[1] = 0
        rewards[9] = 2.0  # a positive advantage, whose ratio is beyond the clip in every token
        logprobs[9][mask[9].bool()] = -60.0
        return batch | {"rewards": rewards, "loss_mask": mask, "logprobs": logprobs}

    options = {"actor__use_decoupled_loss": False, "actor__recompute_logprob": False, "actor__adv_norm": None}
    _, rows, line = explained(train_and_record(tmp_path, tiny_model, 1, silence, **options))
    reasons = {row: sample.why for row, sample in rows.items() if sample.gradient_norm == 0}
    equal, clipped = "all rewards of its group are equal", "every token is clipped (actor.eps_clip)"
    assert {row: reasons.pop(row) for row in (1, 4, 5, 6, 7)} == {
        1: "no token in the loss mask",
        **dict.fromkeys(range(4, 8), equal),
    }
    assert 9 in reasons
    assert set(reasons.values()) == {clipped}  # random log-probs are as far from the model's
    assert {sample.why for sample in rows.values() if sample.gradient_norm > 0} == {""}
    assert f" of 16 samples have none: {len(reasons)} x {clipped}; 4 x {equal}; 1 x no token" in line or (
        f" of 16 samples have none: 4 x {equal}; {len(reasons)} x {clipped}; 1 x no token" in line
    )


BROKEN_ROW = 9
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("key", "value", "norm", "why", "num_broken"),
    [
        late("rewards", NAN, None, "reward is nan", 1),
        ("rewards", NAN, {"mean_level": "group", "std_level": "group", "group_size": 4}, "reward is nan", 4),
        late("logprobs", -INF, None, "log-prob (logprobs) of token 2 is -inf (8 of 8)", 1),
    ],
)
def test_the_first_value_that_is_not_finite_is_named(tmp_path, tiny_model, key, value, norm, why, num_broken):
    def broken(batch, step):
        changed = batch[key].clone()
        changed[BROKEN_ROW] = torch.where(
            batch["loss_mask"][BROKEN_ROW].bool() if changed.dim() == 2 else torch.tensor(True),
            value,
            changed[BROKEN_ROW],
        )
        return batch | {key: changed}

    options = {"actor__reward_norm": norm, "actor__adv_norm": None, "actor__nonfinite": "skip"}
    found, _, line = explained(train_and_record(tmp_path, tiny_model, 1, broken, **options))
    assert (found.samples[0].row, found.samples[0].why) == (BROKEN_ROW, why)
    is_finite = [sample.stage is None for sample in found.samples]
    assert is_finite == [False] * num_broken + [True] * (16 - num_broken)
    assert f"{num_broken} of 16 samples have a value that is not finite" in line
    assert f"row {BROKEN_ROW} (prompt 2, sample 1): {why}." in line


@pytest.mark.long
def test_an_update_that_breaks_the_weights_is_named_and_no_sample(tmp_path, tiny_model):
    optimizer = {"lr": 1e30, "warmup_steps_proportion": 0.0}
    options = {"actor__optimizer": optimizer, "actor__nonfinite": "skip", "actor__ppo_n_minibatches": 4}
    found, _, line = explained(train_and_record(tmp_path, tiny_model, 1, **options))
    assert math.isfinite(found.grad_norms[0])
    assert not any(map(math.isfinite, found.grad_norms[1:]))
    assert (found.broken_by, found.learning_rates[0]) == (0, 1e30)
    assert (
        "Up to minibatch 0 every sample is finite, after it none is (12 of 16): its update broke the "
        "weights (learning rate 1e+30). No single sample is to blame." in line
    )
    assert "row" not in line


@pytest.mark.parametrize(
    ("stages", "update"),
    [
        ([None, 12, 12, 13], 0),
        ([None, None, 12, 12], 1),
        ([None, 12, None, 12], None),  # a finite sample after it
        ([None, 9, 9, 9], None),  # an advantage, which no weight changes
        ([None, None, None, 12], None),  # one sample, perhaps by itself
        ([12, 12, 12, 12], None),
        ([None] * 4, None),
    ],
)
def test_an_update_is_blamed_only_for_all_that_follow(stages, update):
    samples = [SampleShare(0, 0, i, 0, 0, 8, *[0.0] * 6, "", stage) for i, stage in enumerate(stages)]
    assert broken_update(samples) == update
