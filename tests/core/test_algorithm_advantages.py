"""Token rewards and GAE over trainable tokens."""

import torch

from areal_core.algorithm.advantages import compute_advantages, gae, terminal_rewards

STOP, LENGTH = 0, 1


def advantages_of(rewards, loss_mask, finish=STOP, **options):
    loss_mask = torch.tensor(loss_mask)
    zeros = torch.zeros(loss_mask.shape)
    arguments = {"logprobs": zeros, "attention_mask": torch.ones_like(loss_mask, dtype=torch.bool)} | options
    return compute_advantages(
        torch.tensor(rewards), loss_mask, finish_reason=torch.full((len(rewards),), finish), **arguments
    )


def test_without_discount_every_trainable_token_gets_the_reward():
    got = advantages_of([2.0, -1.0], [[0, 1, 1, 0], [0, 0, 1, 0]])
    assert got.advantages.tolist() == [[0.0, 2.0, 2.0, 0.0], [0.0, 0.0, -1.0, 0.0]]
    assert got.returns.tolist() == got.advantages.tolist()
    assert got.total_rewards.tolist() == [[0.0, 0.0, 2.0, 0.0], [0.0, 0.0, -1.0, 0.0]]


def test_reward_survives_masked_tokens_at_the_end():
    # The sequence ends in two tokens of tool output.
    got = advantages_of([3.0], [[1, 1, 0, 0]])
    assert got.advantages.tolist() == [[3.0, 3.0, 0.0, 0.0]]


def test_row_without_trainable_tokens_has_no_reward():
    assert terminal_rewards(torch.tensor([5.0, 1.0]), torch.tensor([[0, 0], [1, 0]])).tolist() == [
        [0, 0],
        [1, 0],
    ]


def test_gae_matches_literal_numbers():
    # discount 0.5, lambda 0.5, V = 1, 2, terminal reward 4:
    # A_1 = 4 + 0.5 * 0 - 2 = 2;  A_0 = 0 + 0.5 * 2 - 1 + 0.25 * 2 = 0.5
    rewards, values = torch.tensor([[0.0, 4.0]]), torch.tensor([[1.0, 2.0]])
    got = gae(rewards, values, torch.ones(1, 2), torch.zeros(1), 0.5, 0.5)
    assert got.tolist() == [[0.5, 2.0]]


def test_masked_tokens_between_are_no_steps_of_the_policy():
    # The same two steps with a tool's two tokens between them: same advantages.
    rewards, values = torch.tensor([[0.0, 9.0, 9.0, 4.0]]), torch.tensor([[1.0, 7.0, 7.0, 2.0]])
    got = gae(rewards, values, torch.tensor([[1, 0, 0, 1]]), torch.zeros(1), 0.5, 0.5)
    assert got.tolist() == [[0.5, 0.0, 0.0, 2.0]]


def test_truncated_row_has_its_reward_or_bootstraps_from_the_value_after_its_last_token():
    values = torch.tensor([[1.0, 2.0, 8.0, 0.0]])
    attention = torch.tensor([[1, 1, 1, 0]], dtype=torch.bool)
    options = {"values": values, "attention_mask": attention, "discount": 0.5}
    stopped = advantages_of([4.0], [[1, 1, 0, 0]], **options)
    cut_off = advantages_of([4.0], [[1, 1, 0, 0]], LENGTH, **options)
    bootstrapped = advantages_of([4.0], [[1, 1, 0, 0]], LENGTH, mask_no_eos_with_zero=True, **options)
    assert stopped.advantages[0, 1] == cut_off.advantages[0, 1] == 4 - 2
    assert bootstrapped.advantages[0, 1] == 0.5 * 8 - 2
    assert bootstrapped.returns[0, 1] == 0.5 * 8


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
