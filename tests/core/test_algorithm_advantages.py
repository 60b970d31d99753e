"""Token rewards and GAE over trainable tokens."""

import torch

from areal_core.algorithm.advantages import compute_advantages

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
