"""A step that depends on its layout is named with its factor; ours does not."""

import pytest
import torch

from areal_core.trainer.objective import PolicyObjective
from replayer.invariance import LAYOUTS, assert_invariant, run_layouts

BATCH = {"input_ids": torch.arange(1, 33).reshape(8, 4), "loss_mask": torch.ones(8, 4, dtype=torch.int32)}


def step_of(divide_again=False, mean_of_means=False):
    weight = torch.ones(1, requires_grad=True)

    def step(micro_batches):
        weight.grad = None
        tokens = sum(int(part["loss_mask"].sum()) for part in micro_batches)
        total = 0.0
        for part in micro_batches:
            mask = part["loss_mask"]
            divisor = tokens * (len(micro_batches) if divide_again else 1)
            if mean_of_means:
                divisor = mask.numel()
            loss = (weight * part["input_ids"] * mask).sum() / divisor
            loss.backward()
            total += float(loss.detach())
        return {"loss": total, "grad_norm": float(weight.grad.norm())}

    return step


def test_a_step_that_is_summed_over_all_tokens_is_invariant():
    assert_invariant(step_of(), BATCH)


def test_a_division_by_micro_batches_is_named():
    with pytest.raises(AssertionError, match=r"accumulation 4: loss is .*divided by the micro-batches"):
        assert_invariant(step_of(divide_again=True), BATCH)


def test_rows_that_leak_into_each_other_where_they_are_packed_are_named():
    def leaks(parts):  # each row sees those before it
        return {"loss": sum(float(part["input_ids"].double().cumsum(0).sum()) for part in parts)}

    with pytest.raises(AssertionError, match=r"rows alone: .*no count .*: rows packed in one sequence"):
        assert_invariant(leaks, BATCH, ("rows alone",))


def test_a_recorded_step_has_one_loss_in_every_layout(tiny_run, monkeypatch):
    found = run_layouts(tiny_run.path, 0)
    assert (found.faithful, found.layouts, found.variants) == (True, LAYOUTS, [])
    loss, calls = PolicyObjective.loss, []

    def by_rows(objective, logprobs, entropy, flat):
        calls.append(1)
        return loss(objective, logprobs, entropy, flat) * (len(flat["cu_seqlens"]) - 1)

    monkeypatch.setattr(PolicyObjective, "loss", by_rows)
    found = run_layouts(tiny_run.path, 0)
    assert calls
    named = {(one.layout, one.named) for _, one in found.variants}
    assert ("accumulation 4", "divided by the micro-batches") in named
