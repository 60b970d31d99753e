"""Formulas against float64 numpy written from their papers.

Several shapes, holes in the mask, empty rows, lost samples.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from areal_core.algorithm.advantages import compute_advantages
from areal_core.algorithm.gae_lambda import lengths_of, relative_position_gae_lambda, vapo_length_adaptive_gae
from areal_core.algorithm.losses import (
    cispo_loss,
    dpo_loss,
    entropy_bonus,
    policy_loss,
    reward_model_loss,
    sapo_loss,
    sft_loss,
)
from areal_core.algorithm.normalization import normalize_episodes
from areal_core.algorithm.off_policy import behaviour_weights

# Lengths of packed sequences; the sequence at EMPTY has no tokens in the loss mask.
SHAPES = ([5, 1, 9, 3], [1, 1], [40, 2, 17, 8, 23, 1])
EMPTY = 1


def packed(lengths, spread=0.4):
    """Return (logprobs, proximal, behaviour, advantages, mask, cu_seqlens).

    float64, bool and int64; with holes in the mask and an empty sequence.
    """
    random = np.random.default_rng(sum(lengths))
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    columns = random.normal(-1, spread, (3, sum(lengths)))
    mask = random.random(sum(lengths)) < 0.7
    mask[cu_seqlens[EMPTY] : cu_seqlens[EMPTY + 1]] = False
    return *columns, random.normal(size=sum(lengths)), mask, cu_seqlens


def tensors(*arrays):
    return [torch.from_numpy(array) for array in arrays]


def trained(mask, cu_seqlens):
    """Return the positions of the tokens in the loss mask of each sequence."""
    return [start + np.flatnonzero(mask[start:end]) for start, end in itertools.pairwise(cu_seqlens)]


@pytest.mark.parametrize("lengths", SHAPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("higher", "c_clip"), [(None, None), (0.28, None), (0.3, 1.3)])
def test_policy_loss(lengths, level, higher, c_clip):
    logprobs, prox, behaviour, advantages, mask, cu_seqlens = packed(lengths)
    weights = np.exp(prox - behaviour)
    expected = 0.0
    for tokens in trained(mask, cu_seqlens):
        for i in tokens:
            ratio, a = math.exp(logprobs[i] - prox[i]), advantages[i]
            if level == "sequence":
                ratio = np.prod(np.exp(logprobs[tokens] - prox[tokens])) ** (1 / len(tokens))
                a = advantages[tokens].mean()
            loss = -min(ratio * a, np.clip(ratio, 0.8, 1.2 if higher is None else 1 + higher) * a)
            if c_clip is not None and a < 0:
                loss = -max(-loss, c_clip * a)
            expected += weights[i] * loss
    got, _ = policy_loss(
        *tensors(logprobs, prox, advantages, mask, cu_seqlens), eps_clip=0.2, eps_clip_higher=higher,
        c_clip=c_clip, level=level, weights=torch.from_numpy(weights),
    )  # fmt: skip
    np.testing.assert_allclose(got.sum().item(), expected, rtol=1e-10)


@pytest.mark.parametrize("lengths", SHAPES)
@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.1, 0.05)])
def test_cispo_loss_and_its_gradient_beyond_the_bounds(lengths, low, high):
    logprobs, prox, behaviour, advantages, mask, _ = packed(lengths)
    ratio, weights = np.exp(logprobs - prox), np.exp(prox - behaviour)
    slope = np.where(mask, -np.clip(ratio, 1 - low, 1 + high) * advantages * weights, 0.0)
    now, *others = tensors(logprobs, prox, advantages, mask)
    got, stats = cispo_loss(
        now.requires_grad_(), *others, eps_clip=low, eps_clip_higher=high, weights=torch.from_numpy(weights)
    )
    got.sum().backward()
    np.testing.assert_allclose(got.detach().numpy(), slope * np.where(mask, logprobs, 0), rtol=1e-10)
    np.testing.assert_allclose(now.grad.numpy(), slope, rtol=1e-10)
    assert stats["clip_mask"].tolist() == (mask & ((ratio < 1 - low) | (ratio > 1 + high))).tolist()


@pytest.mark.parametrize("lengths", SHAPES)
def test_sapo_loss(lengths):
    logprobs, old, _, advantages, mask, _ = packed(lengths)
    ratio, tau = np.exp(logprobs - old), np.where(advantages > 0, 0.7, 1.3)
    expected = (-advantages * 4 / tau / (1 + np.exp(-tau * (ratio - 1))))[mask].sum()
    got, _ = sapo_loss(*tensors(logprobs, old, advantages, mask), tau_pos=0.7, tau_neg=1.3)
    np.testing.assert_allclose(got.sum().item(), expected, rtol=1e-6)


DISTANCES = {
    "ratio": lambda d: d,
    "kl_k1": lambda d: d,
    "kl_k2": lambda d: d**2 / 2,
    "kl_k3": lambda d: np.exp(-d) - 1 + d,
}
JOINED = {"mean": np.mean, "sum": np.sum, "max": np.max}


def rejected_by_numpy(prox, behaviour, mask, cu_seqlens, level, action, metric, agg, lower, upper):
    """Return (kept, weights, filtered) as `behaviour_weights` names them."""
    kept, filtered = np.zeros((2, len(mask)), dtype=bool)
    weights = np.zeros(len(mask))
    for tokens in trained(mask, cu_seqlens):
        for i in tokens:
            difference = (prox - behaviour)[tokens if level == "sequence" else [i]]
            joined = JOINED[agg](DISTANCES[metric](difference))
            measured = math.exp(joined) if metric == "ratio" else joined
            # upstream's: the geometric mean of the sequence, whatever its bounds judge
            shared = level == "sequence" and metric == "ratio"
            weight = math.exp(difference.mean() if shared else prox[i] - behaviour[i])
            filtered[i] = not (lower is None or measured >= lower) or not (upper is None or measured <= upper)
            if action == "clamp" and filtered[i]:
                weight = np.clip(weight, lower or 0.0, upper)
            kept[i] = action == "clamp" or not filtered[i]
            weights[i] = weight * kept[i]
    return kept, weights, filtered


FORMS = [
    (level, action, metric, agg)
    for level, action, metric, agg in itertools.product(
        ("token", "sequence"), ("mask", "clamp"), DISTANCES, JOINED
    )
    if (action == "mask" or metric == "ratio") and (level == "sequence" or agg == "mean")
]


@pytest.mark.parametrize("lengths", SHAPES)
@pytest.mark.parametrize(("level", "action", "metric", "agg"), FORMS)
@pytest.mark.parametrize(("lower", "upper"), [(None, 1.05), (0.1, 1.2)])
def test_every_form_of_rejection_sampling(lengths, level, action, metric, agg, lower, upper):
    _, prox, behaviour, _, mask, cu_seqlens = packed(lengths)
    form = {"level": level, "action": action, "metric": metric, "agg": agg, "lower": lower, "upper": upper}
    kept, weights, filtered = rejected_by_numpy(prox, behaviour, mask, cu_seqlens, **form)
    got = behaviour_weights(*tensors(prox, behaviour, mask, cu_seqlens), **form)
    assert got[0].tolist() == kept.tolist()
    np.testing.assert_allclose(got[1].numpy(), weights, rtol=1e-5)
    assert got[2].tolist() == filtered.tolist()


@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_sft_loss_and_entropy_bonus_are_those_of_logits(num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, 11, generator=generator, dtype=torch.float64)
    labels = torch.randint(11, (num_tokens,), generator=generator)
    mask = torch.rand(num_tokens, generator=generator) < 0.6
    chosen = torch.distributions.Categorical(logits=logits)
    loss, *_ = sft_loss(chosen.log_prob(labels), mask, torch.tensor([0, num_tokens]))
    expected = torch.nn.functional.cross_entropy(logits[mask], labels[mask], reduction="sum")
    torch.testing.assert_close(loss, expected)
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(1, keepdims=True)
    entropy = -(p * np.log(p)).sum(1)[mask.numpy()].sum()
    bonus = entropy_bonus(chosen.entropy(), mask, 0.3).sum()
    np.testing.assert_allclose(bonus.item(), -0.3 * entropy, rtol=1e-10)


@pytest.mark.parametrize("lengths", [[4, 7, 2, 5], [1, 1], [30, 12, 3, 9, 1, 44]])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_dpo_loss(lengths, loss_type):
    logprobs, reference, _, _, mask, cu_seqlens = packed(lengths)
    rows, expected = trained(mask, cu_seqlens), 0.0
    for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
        gains = [(logprobs[tokens] - reference[tokens]).sum() for tokens in (chosen, rejected)]
        if loss_type == "sigmoid":
            expected += math.log1p(math.exp(-0.2 * (gains[0] - gains[1])))
        else:
            means = [
                gain / max(len(tokens), 1) for gain, tokens in zip(gains, (chosen, rejected), strict=True)
            ]
            expected += (means[0] - means[1] - 1 / (2 * 0.2)) ** 2
    got, _ = dpo_loss(*tensors(logprobs, reference, mask, cu_seqlens), beta=0.2, loss_type=loss_type)
    np.testing.assert_allclose(got.item(), expected, rtol=1e-10)


@pytest.mark.parametrize("lengths", [[4, 7], [1, 1, 3, 2], [30, 12, 3, 9, 1, 44]])
def test_reward_model_loss(lengths):
    scores, _, _, _, _, cu_seqlens = packed(lengths)
    last = scores[cu_seqlens[1:] - 1]
    expected = np.log1p(np.exp(-(last[::2] - last[1::2]))).sum()
    loss, stats = reward_model_loss(*tensors(scores, cu_seqlens))
    np.testing.assert_allclose(loss.item(), expected, rtol=1e-10)
    assert stats["correct_ratio"].tolist() == (last[::2] > last[1::2]).tolist()


def advantages_by_numpy(rewards, mask, logprobs, reference, values, attention, cut_off, options):
    """Return (advantages, returns), each row as the list of its tokens in the loss mask."""
    advantages, returns = np.zeros((2, *mask.shape))
    for row in range(len(mask)):
        steps = np.flatnonzero(mask[row])
        if not len(steps):
            continue
        d = logprobs[row, steps] - reference[row, steps]
        kl = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[options["kl_estimator"]]
        r = -options["kl_ctl"] * np.clip(kl, -10, 10)
        is_bootstrapped = cut_off[row] and options["mask_no_eos_with_zero"]
        r[-1] += 0.0 if is_bootstrapped else rewards[row]
        after = values[row, attention[row].sum() - 1] if is_bootstrapped else 0.0
        v = np.append(values[row, steps], after)
        delta = r + options["discount"] * v[1:] - v[:-1]
        decay = options["discount"] * options["gae_lambda"]
        for k in range(len(steps)):
            advantages[row, steps[k]] = sum(delta[j] * decay ** (j - k) for j in range(k, len(steps)))
        returns[row, steps] = advantages[row, steps] + v[:-1]
    return advantages, returns


@pytest.mark.parametrize("shape", [(1, 1), (6, 19), (13, 40)])
@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(("discount", "gae_lambda", "mask_no_eos"), [(1.0, 1.0, False), (0.97, 0.9, True)])
def test_advantages_with_penalty_values_holes_and_cut_off_rows(shape, kl_estimator, discount, gae_lambda, mask_no_eos):  # fmt: skip
    random = np.random.default_rng(shape[1])
    logprobs, reference, values = random.normal(-1, 0.5, (3, *shape)).astype(np.float32)
    lengths = random.integers(1, shape[1] + 1, shape[0])
    attention = np.arange(shape[1]) < lengths[:, None]
    mask = attention & (random.random(shape) < 0.6)
    mask[0] = False
    rewards, cut_off = random.normal(size=shape[0]).astype(np.float32), random.random(shape[0]) < 0.4
    options = {
        "kl_ctl": 0.1, "kl_estimator": kl_estimator, "discount": discount, "gae_lambda": gae_lambda,
        "mask_no_eos_with_zero": mask_no_eos,
    }  # fmt: skip
    expected = advantages_by_numpy(rewards, mask, logprobs, reference, values, attention, cut_off, options)
    got = compute_advantages(
        *tensors(rewards, mask, logprobs, attention), torch.from_numpy(cut_off.astype(np.int32)),
        reference_logprobs=torch.from_numpy(reference), values=torch.from_numpy(values), **options,
    )  # fmt: skip
    np.testing.assert_allclose(got.advantages.numpy(), expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.returns.numpy(), expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_values", [True, False])
def test_a_turn_is_one_step_of_gae_and_the_penalty_stays_with_its_token(has_values):
    random = np.random.default_rng(5)
    shape, discount = (6, 21), 0.9
    turns = np.sort(random.integers(0, 5, shape), axis=1) + random.integers(0, 3, (6, 1))  # also gaps
    mask = (turns > 0) & (random.random(shape) < 0.6)
    mask[0] = False
    logprobs, reference, values = random.normal(-1, 0.3, (3, *shape)).astype(np.float32)
    values *= has_values
    rewards, lambdas = random.normal(size=(2, 6)).astype(np.float32)
    penalty = np.where(mask, -0.1 * (logprobs - reference), 0)
    expected, returns = np.zeros((2, *shape))
    for row in range(6):
        steps = [
            np.flatnonzero(mask[row] & (turns[row] == turn)) for turn in np.unique(turns[row][mask[row]])
        ]
        advantage = after = 0.0
        for number, tokens in enumerate(reversed(steps)):
            value = values[row, tokens[0]]
            delta = (rewards[row] if number == 0 else 0.0) + discount * after - value
            advantage, after = delta + discount * lambdas[row] * advantage, value
            expected[row, tokens], returns[row, tokens] = advantage, advantage + value
    got = compute_advantages(
        *tensors(rewards, mask, logprobs, np.ones(shape, bool)), torch.zeros(6, dtype=torch.int32),
        reference_logprobs=torch.from_numpy(reference), values=torch.from_numpy(values) if has_values else None,
        kl_ctl=0.1, discount=discount, gae_lambda=torch.from_numpy(lambdas), turns=torch.from_numpy(turns),
    )  # fmt: skip
    np.testing.assert_allclose(got.advantages.numpy(), expected + penalty, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.returns.numpy(), returns, rtol=1e-4, atol=1e-5)


def test_lambdas_follow_the_number_of_tokens_or_turns_of_a_row():
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]], dtype=torch.bool)
    tokens, turns = (lengths_of(mask, None, unit) for unit in ("token", "turn"))
    assert (tokens["timestep_lengths"].tolist(), turns["timestep_lengths"].tolist()) == ([4, 0, 1], [2, 0, 1])
    assert lengths_of(mask, torch.full((3, 6), 7), "turn")["turn_counts"].tolist() == [1, 0, 1]
    assert vapo_length_adaptive_gae(tokens, alpha=0.5).tolist() == [0.5, 0.0, 0.0]
    kept = relative_position_gae_lambda(tokens, q=0.125)
    np.testing.assert_allclose(kept.numpy(), [0.5, 0.0, 1.0])  # 0.5 ** 3 is the share of the first token
    for wrong in ({"alpha": 0}, {"alpha": True}):
        with pytest.raises(ValueError, match="expected a number above 0"):
            vapo_length_adaptive_gae(tokens, **wrong)


def test_rewards_of_episodes_are_normalised_by_the_last_row_of_each():
    rewards, groups = torch.tensor([0.2, 1.0, 3.0, 5.0, 5.0]), torch.tensor([4, 4, 4, 9, 9])
    got = normalize_episodes(rewards, groups, torch.tensor([0, 0, 1, 0, 1]))
    np.testing.assert_allclose(got.numpy(), [-1, -1, 1, 0, 0], rtol=1e-6)  # 1 and 3: mean 2, deviation 1
