"""Losses and their gradients against TRL's loss functions.

The functions of its trainers are called with given logprobs, without a model.
"""

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from areal_core.algorithm.advantages import kl_estimate
from areal_core.algorithm.losses import (
    aggregate_loss,
    dpo_loss,
    entropy_bonus,
    kl_loss,
    loss_denominator,
    policy_loss,
    sapo_loss,
)
from areal_core.algorithm.off_policy import behaviour_weights

pytestmark = pytest.mark.long  # importing TRL takes longer than all other tests of formulas
ROWS, WIDTH = 6, 13


@pytest.fixture(scope="module")
def trl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer.dpo_trainer import DPOTrainer
        from trl.trainer.grpo_trainer import GRPOTrainer
    return SimpleNamespace(grpo=GRPOTrainer._compute_loss, dpo=DPOTrainer._compute_loss)


class Rows:
    """Completions of several lengths with holes in the mask; all float64.

    Padded as TRL expects them, and packed as ours.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def column() -> torch.Tensor:
            return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) * 0.5 - 1

        self.logprobs, self.old, self.behaviour, self.reference, self.entropy = (column() for _ in range(5))
        self.advantages = torch.randn(ROWS, generator=generator, dtype=torch.float64)
        lengths = torch.randint(2, WIDTH + 1, (ROWS,), generator=generator)
        self.real = torch.arange(WIDTH) < lengths[:, None]
        self.mask = self.real & (torch.rand(ROWS, WIDTH, generator=generator) < 0.7)
        self.mask[:, 0] = True
        self.cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))

    def packed(self, column: torch.Tensor) -> torch.Tensor:
        return column[self.real]

    def row(self, index: int) -> torch.Tensor:
        return self.real & (torch.arange(ROWS) == index)[:, None]


def accelerator() -> SimpleNamespace:
    def same(value, **_):
        return value

    return SimpleNamespace(
        num_processes=1, sync_gradients=False, device="cpu", gather=same, reduce=same, gather_for_metrics=same
    )


def loss_of_trl(compute, rows: Rows, **options):
    """Return the sum of TRL's policy loss over the loss mask and its gradient by logprobs."""
    logprobs = rows.logprobs.clone().requires_grad_()
    arguments = SimpleNamespace(
        delta=options.get("delta"), use_bias_correction_kl=False, steps_per_generation=1,
        sapo_temperature_pos=0.8, sapo_temperature_neg=1.2,
    )  # fmt: skip
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, rows.entropy, None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, args=arguments,
        importance_sampling_level=options.get("level", "token"), loss_type=options.get("loss_type", "dapo"),
        beta=options.get("beta", 0.0), epsilon_low=0.2, epsilon_high=options.get("higher", 0.2),
        use_vllm="weights" in options, vllm_importance_sampling_correction=True, use_adaptive_entropy=False,
        model=SimpleNamespace(training=True), accelerator=accelerator(), current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled="entropy_coef" in options, entropy_coef=options.get("entropy_coef"),
        _metrics=defaultdict(lambda: defaultdict(list)), max_completion_length=WIDTH,
    )  # fmt: skip
    ids = torch.zeros(ROWS, WIDTH, dtype=torch.long)
    count = rows.mask.sum()
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids,
        "completion_mask": rows.real.long(), "tool_mask": rows.mask.long(), "advantages": rows.advantages,
        "old_per_token_logps": rows.old, "ref_per_token_logps": rows.reference, "num_items_in_batch": count,
        "importance_sampling_ratio": options.get("weights"),
    }  # fmt: skip
    loss = compute(trainer, None, inputs) * count
    loss.backward()
    return loss.detach(), rows.packed(logprobs.grad)


def ours(rows: Rows, **options):
    logprobs = rows.packed(rows.logprobs).requires_grad_()
    advantages = rows.packed(rows.advantages[:, None].expand(ROWS, WIDTH))
    loss, _ = policy_loss(logprobs, rows.packed(rows.old), advantages, rows.packed(rows.mask), rows.cu_seqlens, **options)  # fmt: skip
    return loss.sum(), logprobs


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("theirs", "options"),
    [
        ({}, {}),
        ({"higher": 0.28}, {"eps_clip_higher": 0.28}),
        ({"delta": 1.6}, {"c_clip": 1.6}),
        ({"level": "sequence"}, {"level": "sequence"}),
    ],
    ids=["clip", "clip-higher", "dual clip", "GSPO"],
)
def test_policy_loss_is_that_of_trl(trl, seed, theirs, options):
    rows = Rows(seed)
    expected, slope = loss_of_trl(trl.grpo, rows, **theirs)
    loss, logprobs = ours(rows, **options)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(logprobs.grad, slope)


def test_truncated_importance_sampling_is_that_of_trl(trl):
    rows = Rows(3)
    ratio = (rows.old - rows.behaviour).exp().clamp(max=1.3)
    expected, slope = loss_of_trl(trl.grpo, rows, weights=ratio)
    packed = [rows.packed(column) for column in (rows.old, rows.behaviour, rows.mask)]
    kept, weights, _ = behaviour_weights(*packed, rows.cu_seqlens, action="clamp", upper=1.3)
    loss, logprobs = ours(rows, weights=weights.double())
    loss.backward()
    assert kept.tolist() == packed[2].tolist()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=1e-6)  # weights are float32
    torch.testing.assert_close(logprobs.grad, slope, rtol=1e-6, atol=1e-6)


def test_kl_to_a_reference_is_that_of_trl(trl):
    rows = Rows(4)
    plain, _ = loss_of_trl(trl.grpo, rows)
    expected, _ = loss_of_trl(trl.grpo, rows, beta=0.5)
    penalty = 0.5 * kl_estimate(rows.logprobs, rows.reference, "k3")[rows.mask].sum()
    torch.testing.assert_close(plain + penalty, expected)


@pytest.mark.parametrize(
    ("loss_type", "aggregation"),
    [
        ("dapo", "token-mean"),
        ("bnpo", "token-mean"),
        ("grpo", "seq-mean-token-mean"),
        ("dr_grpo", "seq-mean-token-sum-norm"),
    ],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_aggregation_with_a_kl_loss_is_that_of_trl(trl, loss_type, aggregation, level):
    rows = Rows(8)
    expected, slope = loss_of_trl(trl.grpo, rows, loss_type=loss_type, beta=0.5, level=level)
    logprobs = rows.packed(rows.logprobs).requires_grad_()
    old, reference, mask = (rows.packed(column) for column in (rows.old, rows.reference, rows.mask))
    advantages = rows.packed(rows.advantages[:, None].expand(ROWS, WIDTH))
    losses, _ = policy_loss(logprobs, old, advantages, mask, rows.cu_seqlens, level=level)
    losses = losses + 0.5 * kl_loss(logprobs, reference, mask)
    total = aggregate_loss(losses, mask, rows.cu_seqlens, aggregation)
    loss = total / loss_denominator(rows.mask, aggregation, WIDTH) * rows.mask.sum()
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(logprobs.grad, slope)


def test_entropy_bonus_is_that_of_trl(trl):
    rows = Rows(5)
    plain, _ = loss_of_trl(trl.grpo, rows)
    expected, _ = loss_of_trl(trl.grpo, rows, entropy_coef=0.02)
    torch.testing.assert_close(plain + entropy_bonus(rows.entropy, rows.mask, 0.02).sum(), expected)


def test_sapo_is_that_of_trl(trl):
    rows = Rows(6)
    expected, _ = loss_of_trl(trl.grpo, rows, loss_type="sapo")  # a mean of the means of rows
    means = [
        sapo_loss(
            rows.logprobs[row], rows.old[row], rows.advantages[index], rows.mask[row], tau_pos=0.8, tau_neg=1.2
        )[0].sum()
        / rows.mask[row].sum()
        for index in range(ROWS)
        for row in (rows.row(index),)
    ]  # fmt: skip
    torch.testing.assert_close(torch.stack(means).mean(), expected / rows.mask.sum())


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_dpo_is_that_of_trl(trl, loss_type):
    rows = Rows(7)
    chosen_first = torch.cat([torch.arange(0, ROWS, 2), torch.arange(1, ROWS, 2)])  # ours are packed in turns
    logprobs = rows.logprobs.clone().requires_grad_()

    def outputs(column: torch.Tensor) -> SimpleNamespace:
        masked = torch.where(rows.mask, column, 0.0)[chosen_first]
        padded = torch.nn.functional.pad(masked, (1, 0))
        zeros = torch.zeros_like(padded)
        return SimpleNamespace(log_probs=padded, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator(), aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[loss_type], loss_weights=[1.0],
        beta=0.3, use_weighting=False, _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    reference = outputs(rows.reference).log_probs.sum(1)
    inputs = {
        "input_ids": torch.zeros(ROWS, WIDTH + 1, dtype=torch.long), "attention_mask": torch.ones(ROWS, WIDTH + 1),
        "completion_mask": torch.nn.functional.pad(rows.mask.long(), (1, 0))[chosen_first],
        "ref_chosen_logps": reference[: ROWS // 2], "ref_rejected_logps": reference[ROWS // 2 :],
    }  # fmt: skip
    expected = trl.dpo(trainer, lambda **_: outputs(logprobs), inputs, False) * (ROWS // 2)
    expected.backward()
    packed = rows.packed(rows.logprobs).requires_grad_()
    fixed = [rows.packed(rows.reference), rows.packed(rows.mask), rows.cu_seqlens]
    loss, _ = dpo_loss(packed, *fixed, beta=0.3, loss_type=loss_type)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(packed.grad, rows.packed(logprobs.grad))
