"""The sample that made a step is named, and shares add up to the step that was taken."""

import pytest
import torch

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


def test_the_random_numbers_of_the_step_are_not_used_up(spiked):
    torch.manual_seed(0)
    explain(spiked.path, 0)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    explain(spiked.path, 0)
    assert torch.equal(torch.rand(1), drawn)  # the replay ends with the recorded state, whatever was before
