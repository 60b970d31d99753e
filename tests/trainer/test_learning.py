from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from areal_core.config import NormConfig, PPOActorConfig, RejectionSamplingConfig
from areal_core.errors import ConfigError
from areal_core.telemetry.stats import Stats
from areal_core.trainer.objective import PolicyObjective, build_objective
from areal_core.trainer.step_stats import log_batch


@dataclass
class FixedScorer:
    """An engine whose logprobs are given."""

    logprobs: torch.Tensor

    def compute_logprobs(self, batch):
        return self.logprobs * batch["loss_mask"]

    def score(self, batch):
        return self.compute_logprobs(batch), torch.full_like(self.logprobs, 0.5) * batch["loss_mask"]


def batch():
    """Two prompts, two samples each: one prompt token, then two tokens in the loss mask."""
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
    defaults = {"kl_ctl": 0.0, "reward_norm": NormConfig(mean_level="group", std_level=None, group_size=2)}
    return PolicyObjective(PPOActorConfig(**defaults | options), lambda tensor: tensor, Stats())


def test_grpo_advantages_are_rewards_minus_their_group_mean_on_positions_in_the_loss_mask():
    inputs = objective().learning_inputs(batch(), FixedScorer(torch.zeros(4, 3)), None, 0)
    # Group means are 0.5 and 3. Position t predicts token t + 1: the two tokens in the loss mask
    # are at 0 and 1.
    want = [[0.5, 0.5, 0.0], [-0.5, -0.5, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert inputs["advantages"].tolist() == want
    assert inputs["logprobs"][0].tolist() == [-1.0, -2.0, 0.0]
    assert inputs["loss_mask"][0].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("options", "behaviour", "proximal"),
    [
        ({}, -1.0, -1.0),  # the engine's logprobs are both
        ({"recompute_logprob": True}, -0.25, -0.25),  # the trainer's logprobs are both
        ({"use_decoupled_loss": True}, -1.0, -0.25),  # each has its own
    ],
)
def test_whose_logprobs_are_behaviour_and_proximal(options, behaviour, proximal):
    inputs = objective(**options).learning_inputs(batch(), FixedScorer(torch.full((4, 3), -0.25)), None, 0)
    assert inputs["logprobs"][0, 0] == behaviour
    assert inputs["prox_logp"][0, 0] == proximal
    assert inputs["prox_logp"][0, 2] == 0.0  # nothing is trained there


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


def random_flat(seed=0):
    """Three sequences of 5, 1 and 6 packed tokens."""
    random = np.random.default_rng(seed)
    flat = dict(zip(("prox_logp", "logprobs", "advantages"), random.normal(-1, 0.5, (3, 12)), strict=True))
    flat["loss_mask"] = (random.random(12) < 0.7).astype(np.int32)
    flat["cu_seqlens"] = np.array([0, 5, 6, 12], dtype=np.int32)
    return flat, random.normal(-1, 0.5, 12)


def loss_of(subject, flat, logprobs):
    tensors = {name: torch.from_numpy(array) for name, array in flat.items()}
    return subject.loss(torch.from_numpy(logprobs), torch.zeros(12), tensors).item()


def test_m2po_trusts_tokens_until_the_mean_square_of_the_batch_is_reached():
    subject = objective(use_decoupled_loss=True, m2_threshold=0.05)
    # Proximal minus behaviour: squares 0.01, 0.04, 0.01, 0.09, 0.01, 1.0, 0.01, 0.04. Without the 1
    # the mean is 0.03.
    proximal = torch.tensor([[-0.9, -1.8], [-0.9, -1.7], [-0.9, -1.0], [-0.9, -1.8]])
    scorer = FixedScorer(torch.nn.functional.pad(proximal, (0, 1)))
    inputs = subject.learning_inputs(batch(), scorer, None, 0)
    assert inputs["trusted_mask"].tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 1, 0]]
    assert inputs["loss_mask"].sum() == 8  # the loss is still divided by all tokens in the loss mask


def test_metrics_train_on_the_computed_policy_and_record_the_errors_of_the_approximations():
    flat, logprobs = random_flat(3)
    flat["proximal_share"] = np.full(12, 0.5)
    mask = flat["loss_mask"] > 0
    computed, behaviour = flat["prox_logp"], flat["logprobs"]
    subject = objective(use_decoupled_loss=True, prox_logp_method="metrics")
    want = loss_of(objective(use_decoupled_loss=True), flat, logprobs)
    assert loss_of(subject, flat, logprobs) == want
    stats = subject.stats.export()
    between = (behaviour + logprobs) / 2
    of_probabilities = np.log((np.exp(behaviour) + np.exp(logprobs)) / 2)
    for name, approximate in {"loglinear": between, "linear": of_probabilities, "rollout": behaviour}.items():
        error = np.abs(approximate - computed)[mask]
        assert stats[f"compute_logp/{name}/abs_error/avg"] == pytest.approx(error.mean())
        assert stats[f"compute_logp/{name}/squared_error/max"] == pytest.approx((error**2).max())
        weights = np.exp(approximate - behaviour)[mask]
        assert stats[f"compute_logp/{name}/behave_imp_weight/avg"] == pytest.approx(weights.mean())
    assert stats["compute_logp/prox_logp_gt/avg"] == pytest.approx(computed[mask].mean())
    assert stats["compute_logp/rollout/behave_imp_weight/max"] == 1.0
    moved = (logprobs - behaviour)[mask]
    assert stats["compute_logp/kl_div_direct/avg"] == pytest.approx(-moved.mean())
    assert stats["compute_logp/kl_div_taylor/avg"] == pytest.approx((moved**2).mean() / 2)
    assert stats["compute_logp/kl_div_dual/min"] == pytest.approx((np.exp(moved) - 1 - moved).min())


def test_statistics_of_a_batch_have_the_names_and_values_that_users_know():
    subject, rows = objective(), batch()
    rows["finish_reason"][1] = 1
    inputs = subject.learning_inputs(rows, FixedScorer(torch.zeros(4, 3)), None, 0)
    with subject.stats.scope("ppo_actor"):
        log_batch(subject.stats, rows, inputs)
    stats = subject.stats.export()
    assert stats["ppo_actor/task_reward/avg"] == 1.75
    assert (
        stats["ppo_actor/no_eos_ratios/avg"] == 0.25
    )  # from the finish reason, not from the width of the batch
    assert stats["ppo_actor/n_seqs"] == 4
    assert stats["ppo_actor/zero_variance_groups"] == 0.5  # the rewards of prompt 1 are 3 and 3
    assert stats["ppo_actor/n_valid_tokens"] == 8
    assert stats["ppo_actor/correct_n_seqs"] == 3
    assert stats["ppo_actor/prompt_len/avg"] == 1
    assert stats["ppo_actor/seq_len/max"] == 3


def test_reused_logprobs_are_the_proximal_policy_without_a_forward_pass():
    reusing = objective(use_decoupled_loss=True, prox_logp_method="reuse_train_logp", ppo_n_minibatches=1)
    assert not reusing.options.should_compute_prox_logp()
    logprobs = torch.full((6,), -0.5).requires_grad_()
    loss = reusing.loss(logprobs, torch.zeros(6), packed())  # the engine had -1
    (gradient,) = torch.autograd.grad(loss, logprobs)
    weight = torch.tensor(0.5).exp()  # proximal over behaviour; the policy's own ratio is 1
    torch.testing.assert_close(gradient, weight * torch.tensor([-1.0, -1.0, 0.0, 1.0, 1.0, 0.0]))


def test_a_function_gives_each_row_its_lambda_and_a_critic_shows_it():
    lambdas = "areal_core.algorithm.gae_lambda.vapo_length_adaptive_gae"
    options = PPOActorConfig(kl_ctl=0.0, gae_lambda_fn=lambdas, gae_lambda_kwargs={"alpha": 1.0})
    built = build_objective(options, lambda tensor: tensor, Stats(), None)
    values = torch.full((4, 3), 0.5)
    inputs = built.learning_inputs(batch(), FixedScorer(torch.zeros(4, 3)), None, 0, values=values)
    assert inputs["advantages"][0].tolist() == [0.25, 0.5, 0.0]  # two tokens: lambda 1/2; deltas 0, 1/2
    with pytest.raises(ConfigError, match=r"actor.gae_lambda_fn .* cannot be called with"):
        build_objective(replace(options, gae_lambda_kwargs={}), lambda tensor: tensor, Stats(), None)
