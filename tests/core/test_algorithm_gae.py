"""Token rewards and GAE: against a loop in float64, and the same bits whatever surrounds a row."""

import pytest
import torch

from areal_core.algorithm.advantages import BLOCK, WINDOW, compute_advantages, gae


def case(num_rows, width, seed=0):
    """Return (rewards, values, mask, bootstrap) with holes and an empty row."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, num_rows, width, generator=generator)
    mask = torch.rand(num_rows, width, generator=generator) < 0.7
    mask[0] = False
    return rewards, values, mask, torch.randn(num_rows, generator=generator)


def by_loop(rewards, values, mask, bootstrap, discount, gae_lambda):
    """The definition, token by token, in float64."""
    rewards, values = rewards.double(), values.double()
    advantages = torch.zeros_like(rewards)
    next_value, next_advantage = bootstrap.double(), torch.zeros_like(bootstrap, dtype=torch.float64)
    for t in range(rewards.shape[1] - 1, -1, -1):
        advantage = rewards[:, t] + discount * next_value - values[:, t]
        advantage = advantage + discount * gae_lambda * next_advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
    return advantages


@pytest.mark.parametrize("width", [1, BLOCK, BLOCK + 1, WINDOW, 2 * WINDOW + 77])
@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.9), (0.9, 0.0)])
def test_equals_the_definition_to_float32(width, discount, gae_lambda):
    arguments = *case(5, width), discount, gae_lambda
    expected = by_loop(*arguments)
    error = (gae(*arguments) - expected).abs().max() / expected.abs().max().clamp(min=1e-9)
    assert error < 1e-6


def test_padding_and_other_rows_change_no_bit():
    rewards, values, mask, bootstrap = case(6, WINDOW + 10)
    whole = gae(rewards, values, mask, bootstrap, 0.99, 0.95)
    for row in range(6):
        one = slice(row, row + 1)
        alone = gae(rewards[one], values[one], mask[one], bootstrap[one], 0.99, 0.95)
        assert torch.equal(alone, whole[one])
    for more in (1, BLOCK, 3 * WINDOW):
        wider = [torch.nn.functional.pad(x, (0, more)) for x in (rewards, values, mask)]
        assert torch.equal(gae(*wider, bootstrap, 0.99, 0.95)[:, : WINDOW + 10], whole)


def test_a_reward_reaches_every_token_exactly_without_discount():
    rewards, mask = torch.zeros(2, 3 * WINDOW), torch.ones(2, 3 * WINDOW, dtype=torch.bool)
    mask[:, 100:200] = False
    rewards[0, -1], rewards[1, -5] = 0.1, -1 / 3
    got = gae(rewards, None, mask, torch.zeros(2), 1.0, 1.0)
    assert set(got[0].tolist()) == {0.0, rewards[0, -1].item()}
    assert set(got[1].tolist()) == {0.0, rewards[1, -5].item()}
    assert (got[0] != 0).sum() == 3 * WINDOW - 100


def test_a_critics_values_on_masked_positions_may_be_nan():
    _, values, mask, _ = case(3, 50)
    batch = torch.ones(3), mask, torch.zeros(3, 50), torch.ones(3, 50, dtype=torch.bool), torch.zeros(3)
    expected = compute_advantages(*batch, values=torch.where(mask, values, 0.0), gae_lambda=0.9)
    got = compute_advantages(*batch, values=torch.where(mask, values, float("nan")), gae_lambda=0.9)
    assert torch.equal(got.advantages, expected.advantages)
    assert torch.equal(got.returns, expected.returns)


STOP, LENGTH = 0, 1


def advantages_of(rewards, loss_mask, finish=STOP, **options):
    loss_mask = torch.tensor(loss_mask)
    zeros = torch.zeros(loss_mask.shape)
    arguments = {"logprobs": zeros, "attention_mask": torch.ones_like(loss_mask, dtype=torch.bool)} | options
    return compute_advantages(
        torch.tensor(rewards), loss_mask, finish_reason=torch.full((len(rewards),), finish), **arguments
    )


def test_only_truncated_rows_lose_their_reward_and_the_longest_row_does_not():
    loss_mask, finish = torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.tensor([STOP, LENGTH])
    got = compute_advantages(
        torch.tensor([1.0, 1.0]),
        loss_mask,
        torch.zeros(2, 3),
        loss_mask.bool(),
        finish,
        mask_no_eos_with_zero=True,
    )
    assert got.advantages.tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


def test_kl_penalty_is_a_reward_of_each_token():
    # k1 = 0.5 and -1 with weight 0.1: rewards -0.05 and 0.1, plus 1 at the end
    got = advantages_of(
        [1.0], [[1, 1, 0]], logprobs=torch.tensor([[-1.0, -2.0, 0.0]]),
        reference_logprobs=torch.tensor([[-1.5, -1.0, -9.0]]), kl_ctl=0.1,
    )  # fmt: skip
    torch.testing.assert_close(got.kl_rewards, torch.tensor([[-0.05, 0.1, 0.0]]))
    torch.testing.assert_close(got.total_rewards, torch.tensor([[-0.05, 1.1, 0.0]]))
    torch.testing.assert_close(got.advantages, torch.tensor([[1.05, 1.1, 0.0]]))


def test_masked_junk_does_not_leak():
    junk = torch.tensor([[float("nan"), -1.0, float("inf")]])
    got = advantages_of([1.0], [[0, 1, 0]], logprobs=junk, reference_logprobs=junk, kl_ctl=0.1)
    assert got.advantages.tolist() == [[0.0, 1.0, 0.0]]
