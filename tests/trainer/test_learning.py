from dataclasses import dataclass

import pytest
import torch

from areal_core.config import NormConfig, PPOActorConfig, RejectionSamplingConfig
from areal_core.telemetry import Stats
from areal_core.trainer.learning import PolicyObjective, behaviour_bounds, divide_into_minibatches


@dataclass
class FixedScorer:
    """An engine whose logprobs are given."""

    logprobs: torch.Tensor

    def compute_logprobs(self, batch):
        return self.logprobs * batch["loss_mask"]

    def score(self, batch):
        return self.compute_logprobs(batch), torch.full_like(self.logprobs, 0.5) * batch["loss_mask"]


def batch():
    """Two prompts, two samples each: one prompt token, then two trained tokens."""
    return {
        "input_ids": torch.tensor([[5, 6, 7]] * 4, dtype=torch.int32),
        "attention_mask": torch.ones(4, 3, dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 1, 1]] * 4, dtype=torch.int32),
        "logprobs": torch.tensor([[0.0, -1.0, -2.0]] * 4),
        "versions": torch.tensor([[-1, 0, 0]] * 4, dtype=torch.int32),
        "rewards": torch.tensor([1.0, 0.0, 3.0, 3.0]),
        "prompt_id": torch.tensor([0, 0, 1, 1]),
        "sample_id": torch.tensor([0, 1, 0, 1], dtype=torch.int32),
        "finish_reason": torch.zeros(4, dtype=torch.int32),
    }


def objective(**options):
    defaults = {
        "kl_ctl": 0.0,
        "reward_norm": NormConfig(mean_level="group", std_level=None, group_size=2),
    }
    return PolicyObjective(PPOActorConfig(**defaults | options), lambda tensor: tensor, Stats())


def test_entropy_is_handed_on_where_logprobs_are_recomputed():
    options = objective(use_decoupled_loss=True)
    inputs = options.learning_inputs(batch(), FixedScorer(torch.zeros(4, 3)), None)
    assert inputs["entropy"].tolist() == [[0.5, 0.5, 0.0]] * 4
    taken = objective(use_decoupled_loss=False, recompute_logprob=False)
    assert "entropy" not in taken.learning_inputs(batch(), FixedScorer(torch.zeros(4, 3)), None)


def test_grpo_advantages_by_hand_are_rewards_minus_their_group_mean_on_trained_positions():
    inputs = objective().learning_inputs(batch(), FixedScorer(torch.zeros(4, 3)), None)
    # Group means are 0.5 and 3. Position t speaks of token t + 1: the two trained tokens sit at positions 0 and 1.
    want = [[0.5, 0.5, 0.0], [-0.5, -0.5, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert inputs["advantages"].tolist() == want
    assert inputs["logprobs"][0].tolist() == [-1.0, -2.0, 0.0]
    assert inputs["loss_mask"][0].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("options", "behaviour", "proximal"),
    [
        ({}, -1.0, -1.0),  # the engine's logprobs serve as both
        ({"recompute_logprob": True}, -0.25, -0.25),  # the trainer's own serve as both
        ({"use_decoupled_loss": True}, -1.0, -0.25),  # each has its own
    ],
)
def test_whose_logprobs_are_behaviour_and_proximal(options, behaviour, proximal):
    inputs = objective(**options).learning_inputs(batch(), FixedScorer(torch.full((4, 3), -0.25)), None)
    assert inputs["logprobs"][0, 0] == behaviour
    assert inputs["prox_logp"][0, 0] == proximal
    assert inputs["prox_logp"][0, 2] == 0.0  # nothing is trained there


def test_kl_penalty_against_the_reference_by_hand():
    reference = FixedScorer(torch.full((4, 3), -1.5))
    inputs = objective(kl_ctl=0.1, reward_norm=None).learning_inputs(
        batch(), FixedScorer(torch.zeros(4, 3)), reference
    )
    # k1: -0.1 * (logprob - reference) = -0.1 * 0.5 and -0.1 * -0.5; the reward 1 comes with the last trained token.
    torch.testing.assert_close(inputs["kl_rewards"][0], torch.tensor([-0.05, 0.05, 0.0]))
    torch.testing.assert_close(inputs["advantages"][0], torch.tensor([1.0, 1.05, 0.0]))


def packed(**tensors):
    mask = torch.tensor([1, 1, 0, 1, 1, 0])
    values = {
        "loss_mask": mask,
        "cu_seqlens": torch.tensor([0, 3, 6], dtype=torch.int32),
        "logprobs": -torch.ones(6) * mask,
        "prox_logp": -torch.ones(6) * mask,
        "advantages": torch.tensor([1.0, 1.0, 0.0, -1.0, -1.0, 0.0]),
    }
    return values | tensors


def test_loss_on_policy_is_minus_the_sum_of_advantages_and_its_gradient_minus_each():
    logprobs = (-torch.ones(6)).requires_grad_()
    loss = objective().loss(logprobs, torch.zeros(6), packed())
    assert loss.item() == 0.0  # -(1 + 1 - 1 - 1)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == [-1.0, -1.0, 0.0, 1.0, 1.0, 0.0]


def test_decoupled_loss_weighs_each_token_by_proximal_over_behaviour():
    logprobs = (-torch.ones(6)).requires_grad_()
    half = -torch.ones(6) + torch.tensor(2.0).log()  # the engine found the tokens twice as likely
    decoupled = objective(use_decoupled_loss=True)
    loss = decoupled.loss(logprobs, torch.zeros(6), packed(logprobs=half))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, -0.5, 0.0, 0.5, 0.5, 0.0]))
    stats = decoupled.stats.export()
    assert stats["behave_imp_weight/avg"] == pytest.approx(0.5)
    assert stats["behave_approx_kl/avg"] == pytest.approx(-0.6931472)


def test_tokens_beyond_the_bound_are_left_out_and_counted():
    rejecting = objective(
        use_decoupled_loss=True, rejection_sampling=RejectionSamplingConfig(metric="ratio", upper=5.0)
    )
    far = torch.tensor([-9.0, -1.0, 0.0, -1.0, -1.0, 0.0])  # the first ratio is e^8
    logprobs = (-torch.ones(6)).requires_grad_()
    loss = rejecting.loss(logprobs, torch.zeros(6), packed(logprobs=far))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == [0.0, -1.0, 0.0, 1.0, 1.0, 0.0]
    assert rejecting.stats.export()["rs_filtered_fraction"] == pytest.approx(0.25)


def test_older_cap_means_a_bound_on_the_ratio_and_without_decoupling_there_is_no_correction():
    assert behaviour_bounds(PPOActorConfig(use_decoupled_loss=True, behav_imp_weight_cap=3.0)) == {
        "upper": 3.0
    }
    assert behaviour_bounds(PPOActorConfig(use_decoupled_loss=True)) == {"upper": None}
    assert behaviour_bounds(PPOActorConfig()) is None


def test_minibatches_share_the_rows_and_are_never_more_than_rows(ranks):
    assert divide_into_minibatches(batch(), 2, ranks) == [[0, 2], [1, 3]]
    assert divide_into_minibatches(batch(), 9, ranks) == [[0], [1], [2], [3]]


def test_statistics_of_a_batch_have_the_names_and_values_that_users_know():
    subject, rows = objective(), batch()
    rows["finish_reason"][1] = 1
    inputs = subject.learning_inputs(rows, FixedScorer(torch.zeros(4, 3)), None)
    with subject.stats.scope("ppo_actor"):
        subject.log_batch(rows, inputs)
    stats = subject.stats.export()
    assert stats["ppo_actor/task_reward/avg"] == 1.75
    assert (
        stats["ppo_actor/no_eos_ratios/avg"] == 0.25
    )  # from the finish reason, not from the width of the batch
    assert stats["ppo_actor/n_seqs"] == 4
    assert stats["ppo_actor/n_valid_tokens"] == 8
    assert stats["ppo_actor/correct_n_seqs"] == 3
    assert stats["ppo_actor/prompt_len/avg"] == 1
    assert stats["ppo_actor/seq_len/max"] == 3
