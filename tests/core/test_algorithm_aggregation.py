"""Aggregation of the policy loss: literal numbers, papers' formulas, any division of rows."""

import numpy as np
import pytest
import torch

from areal_core.algorithm.losses import kl_loss
from areal_core.config import PPOActorConfig
from areal_core.data.batch import pack, select_rows
from areal_core.telemetry.stats import Stats
from areal_core.trainer.objective import PolicyObjective

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
MAX_LENGTH = 10


def rows(seed=0):
    """Eleven rows with holes in the mask, one of them without a token in it; float64."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 15, 11)
    real = np.arange(lengths.max()) < lengths[:, None]
    mask = real & (random.random(real.shape) < 0.7)
    mask[4] = False
    columns = random.normal(-1, 0.4, (5, *real.shape)) * real
    names = ("new_logp", "prox_logp", "ref_logp", "advantages", "entropy")
    return {name: torch.from_numpy(c) for name, c in zip(names, columns, strict=True)} | {
        "attention_mask": torch.from_numpy(real),
        "loss_mask": torch.from_numpy(mask).int(),
    }


def objective_by_numpy(batch, aggregation, level):
    """Clipped loss, entropy bonus and k3 of each row by the definitions of the papers."""
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    per_row = []
    for row in range(len(arrays["loss_mask"])):
        new, old, ref, a, entropy = (
            arrays[name][row][arrays["loss_mask"][row] > 0]
            for name in ("new_logp", "prox_logp", "ref_logp", "advantages", "entropy")
        )
        if not len(new):
            continue
        ratio = np.exp(new - old)
        if level == "sequence":
            ratio, a = np.full(len(new), np.exp((new - old).mean())), np.full(len(new), a.mean())
        clipped = -np.minimum(ratio * a, ratio.clip(0.8, 1.2) * a)
        per_row.append(clipped - 0.01 * entropy + 0.3 * (np.exp(ref - new) - 1 - (ref - new)))
    return {
        "token-mean": np.concatenate(per_row).mean(),
        "seq-mean-token-mean": np.mean([x.mean() for x in per_row]),
        "seq-mean-token-sum": np.mean([x.sum() for x in per_row]),
        "seq-mean-token-sum-norm": np.mean([x.sum() / MAX_LENGTH for x in per_row]),
    }[aggregation]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_objective_is_the_papers_for_any_division_into_micro_batches(aggregation, level):
    batch = rows()
    options = PPOActorConfig(
        loss_aggregation=aggregation, importance_sampling_level=level, kl_loss_coef=0.3, entropy_coef=0.01,
        max_new_tokens=MAX_LENGTH,
    )  # fmt: skip
    subject = PolicyObjective(options, lambda sums: sums, Stats())
    expected = objective_by_numpy(batch, aggregation, level)
    gradients = []
    for number in (1, 2, 7):
        new = batch["new_logp"].clone().requires_grad_()
        whole = batch | {"new_logp": new, "logprobs": batch["prox_logp"]}
        total = torch.zeros((), dtype=torch.float64)
        for part in np.array_split(np.random.default_rng(number).permutation(11), number):
            flat = pack(select_rows(whole, part.tolist()))
            total = total + subject.loss(flat["new_logp"], flat["entropy"], flat)
        loss = total / subject.denominator(batch)
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        gradients.append(new.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-12, atol=1e-15)
    assert subject.stats.export()["kl_loss/avg"] > 0


def test_kl_loss_matches_literal_numbers_and_has_a_gradient_far_away():
    # log-ratios to the reference of log 2 and -20; k3 = exp(-d) - 1 + d, its gradient 1 - exp(-d)
    logprobs = torch.tensor([0.5, 1.0, 1.0], dtype=torch.float64).log().requires_grad_()
    reference = torch.tensor([0.25, 1.0, 0.0], dtype=torch.float64).log()
    reference[1] = 20.0
    losses = kl_loss(logprobs, reference, torch.tensor([1, 1, 0]))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([0.5 - 1 + np.log(2), np.exp(20) - 21, 0.0])
    assert logprobs.grad.tolist() == pytest.approx([0.5, 1 - np.exp(20), 0.0])


@pytest.mark.parametrize(("estimator", "of"), [("k1", "none"), ("k2", "policy"), ("k3", "reference")])
def test_the_gradient_of_an_estimator_is_that_of_the_kl_that_the_document_names(estimator, of):
    """Average over a vocabulary, each token weighted by its probability under the policy."""
    random = torch.Generator().manual_seed(1)
    logits, other = torch.randn(2, 6, generator=random, dtype=torch.float64)
    logits.requires_grad_()
    logprobs, reference = logits.log_softmax(0), other.log_softmax(0)
    mean = (logprobs.detach().exp() * kl_loss(logprobs, reference, torch.ones(6), estimator)).sum()
    [gradient] = torch.autograd.grad(mean, logits, retain_graph=True)
    kl = {
        "none": logits.sum() * 0,
        "policy": (logprobs.exp() * (logprobs - reference)).sum(),
        "reference": (reference.exp() * (reference - logprobs)).sum(),
    }[of]
    torch.testing.assert_close(gradient, torch.autograd.grad(kl, logits)[0])
