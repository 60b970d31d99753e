"""The sample that made a step is named, and shares add up to the step that was taken."""

import io
import math

import pytest
import torch
from rich.console import Console

from areal_debug.replay.render import print_explanation
from replayer.explain import explain

SPIKE = (2, 9)  # step, row


def spike(batch, step):
    if step != SPIKE[0]:
        return batch
    rewards = batch["rewards"].clone()
    rewards[SPIKE[1]] = 30.0
    return batch | {"rewards": rewards}


@pytest.fixture(scope="module")
def spiked(tmp_path_factory, tiny_model, record_run):
    """Three steps, the last with an outlier reward, which no normalisation hides."""
    return record_run(
        tmp_path_factory.mktemp("spiked"),
        tiny_model,
        3,
        spike,
        actor__reward_norm=None,
        actor__adv_norm=None,
        actor__use_decoupled_loss=False,
    )


def test_the_sample_that_made_the_spike_comes_first(spiked):
    found = explain(spiked.path, SPIKE[0])
    first = found.samples[0]
    assert (first.row, first.reward) == (SPIKE[1], 30.0)
    assert first.gradient_share > 0.9
    assert first.loss_share > 0.5
    assert len(found.samples) == 16


def test_shares_add_up_to_the_step_that_was_recorded(spiked):
    for step in (1, 2):
        found = explain(spiked.path, step)
        recorded = spiked.record.step(step).plan(0).details["minibatches"]
        assert found.faithful
        for index, minibatch in enumerate(recorded):
            samples = [s for s in found.samples if s.minibatch == index]
            assert sorted(s.row for s in samples) == sorted(minibatch["rows"])
            assert sum(s.gradient_share for s in samples) == pytest.approx(1, abs=1e-4)
            assert sum(s.loss_share for s in samples) == pytest.approx(1)
            assert sum(s.loss for s in samples) == pytest.approx(float.fromhex(minibatch["loss"]), abs=1e-5)
            assert found.grad_norms[index] == pytest.approx(float.fromhex(minibatch["grad_norm"]), rel=1e-5)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_shares_add_up_with_another_aggregation_and_a_kl_in_the_loss(
    tmp_path, tiny_model, record_run, aggregation
):
    run = record_run(
        tmp_path, tiny_model, 2, actor__loss_aggregation=aggregation, actor__max_new_tokens=8,
        actor__kl_loss_coef=0.5, ref__path=str(tiny_model), ref__dtype="float32",
    )  # fmt: skip
    found = explain(run.path, 1)
    assert found.faithful
    for index, minibatch in enumerate(run.record.step(1).plan(0).details["minibatches"]):
        samples = [s for s in found.samples if s.minibatch == index]
        length = 8 if aggregation == "seq-mean-token-sum-norm" else 1
        assert minibatch["loss_denominator"] == length * len(minibatch["rows"])
        assert sum(s.gradient_share for s in samples) == pytest.approx(1, abs=1e-4)
        assert sum(s.loss for s in samples) == pytest.approx(float.fromhex(minibatch["loss"]), abs=1e-5)


def test_the_random_numbers_of_the_step_are_not_used_up(spiked):
    torch.manual_seed(0)
    explain(spiked.path, 0)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    explain(spiked.path, 0)
    assert torch.equal(torch.rand(1), drawn)  # the replay ends with the recorded state, whatever was before


def test_a_step_without_a_gradient_has_no_shares(tmp_path, tiny_model, record_run):
    def alike(batch, step):
        return batch | {"rewards": torch.zeros_like(batch["rewards"])}

    run = record_run(tmp_path, tiny_model, 1, alike)
    found = explain(run.path, 0)
    assert found.faithful
    assert found.grad_norms == [0.0, 0.0]
    assert len(found.samples) == 16
    assert {sample.gradient_norm for sample in found.samples} == {0.0}
    assert all(math.isnan(sample.gradient_share) for sample in found.samples)
    out = Console(file=io.StringIO(), width=200)
    print_explanation(out, run.record, found.to_dict())
    assert "gradient norm 0, 0 (by minibatch). Every sample's gradient is 0" in out.file.getvalue()


def test_samples_with_a_gradient_that_is_not_finite_come_first(tmp_path, tiny_model, record_run):
    def broken(batch, step):
        advantage = batch["rewards"].clone()
        advantage[SPIKE[1]] = math.nan
        return batch | {"rewards": advantage}

    run = record_run(
        tmp_path,
        tiny_model,
        1,
        broken,
        actor__reward_norm=None,
        actor__adv_norm=None,
        actor__nonfinite="skip",
    )
    found = explain(run.path, 0)
    assert (found.samples[0].row, found.samples[0].minibatch) == (SPIKE[1], 1)
    assert [math.isfinite(sample.gradient_norm) for sample in found.samples] == [False] + 15 * [True]
    out = Console(file=io.StringIO(), width=200)
    print_explanation(out, run.record, found.to_dict())
    shown = out.file.getvalue()
    assert f"The gradients of 1 samples are not finite, the first is that of rank 0, row {SPIKE[1]}" in shown
