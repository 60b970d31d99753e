"""Statistics of a step in policy optimisation: its batch, its options, its staleness.

`log_approximations` (`prox_logp_method: metrics`) records the errors of approximated proximal
log-probs: they show whether `loglinear` can be trusted on a run.
"""

import torch
from torch import Tensor

from areal_core.algorithm.advantages import groups_without_spread
from areal_core.algorithm.alignment import first_and_last
from areal_core.algorithm.off_policy import loglinear_proximal_logprobs
from areal_core.config import PPOActorConfig
from areal_core.data.batch import Batch, sequence_lengths
from areal_core.telemetry.stats import Reduce, Stats


def log_batch(stats: Stats, batch: Batch, inputs: Batch) -> None:
    """Record rewards, lengths and advantages; `inputs`: `PolicyObjective.learning_inputs`."""
    lengths = sequence_lengths(batch).float()
    completion = batch["loss_mask"].sum(1).float()
    every = torch.ones_like(batch["rewards"], dtype=torch.bool)
    correct = batch["rewards"] > 0
    valid = inputs["loss_mask"].bool()
    alike, several = groups_without_spread(batch["rewards"], batch["prompt_id"])
    stats.denominator(
        n_seqs=every,
        n_groups=several,
        n_tokens=batch["attention_mask"],
        n_valid_tokens=valid,
        correct_n_seqs=correct,
        incorrect_n_seqs=~correct,
    )
    stats.stat(
        "n_seqs",
        task_reward=batch["rewards"].float(),
        no_eos_ratios=(batch["finish_reason"] == 1).float(),
        prompt_len=lengths - completion,
        seq_len=lengths,
    )
    stats.stat("n_groups", Reduce.AVG, zero_variance_groups=alike.float())
    stats.stat("correct_n_seqs", correct_seq_len=lengths)
    stats.stat("incorrect_n_seqs", incorrect_seq_len=lengths)
    stats.stat(
        "n_valid_tokens",
        advantages=inputs["advantages"],
        kl_rewards=inputs["kl_rewards"],
        final_reward=inputs["total_rewards"],
    )


def log_settings(stats: Stats, options: PPOActorConfig) -> None:
    """Record the options that limit the update under `ppo_actor/`, unless they are not set."""
    rejection = options.rejection_sampling
    upper = rejection.upper if rejection is not None else options.behav_imp_weight_cap
    lower = rejection.lower if rejection is not None else None
    optional = {"c_clip": options.c_clip, "rs_upper": upper, "rs_lower": lower}
    with stats.scope("ppo_actor"):
        stats.scalar(
            mask_no_eos_with_zero=float(options.mask_no_eos_with_zero),
            eps_clip=options.eps_clip,
            use_dual_clip=float(options.c_clip is not None),
        )
        stats.scalar(**{name: value for name, value in optional.items() if value is not None})


def log_approximations(
    stats: Stats, logprobs: Tensor, computed: Tensor, behaviour_logprobs: Tensor, share: Tensor
) -> None:
    """Record the errors of each approximation under `compute_logp/`; all tensors are [tokens].

    The denominator `n_valid_tokens` is that of an enclosing scope.

    Args:
        computed: proximal log-probs of a forward pass.
        share: `loglinear_share` of each token.
    """
    logprobs = logprobs.detach()
    weights = (computed - behaviour_logprobs).exp()
    moved = logprobs - behaviour_logprobs
    with stats.scope("compute_logp"):
        stats.stat(
            "n_valid_tokens",
            prox_logp_gt=computed,
            kl_div_direct=-moved,
            kl_div_taylor=moved**2 / 2,
            kl_div_dual=moved.expm1() - moved,
        )
        for name, approximate in approximations(logprobs, behaviour_logprobs, share).items():
            error = (approximate - computed).abs()
            approximate_weights = (approximate - behaviour_logprobs).exp()
            with stats.scope(name):
                stats.stat(
                    "n_valid_tokens",
                    approx_logp=approximate,
                    abs_error=error,
                    rel_error=error / computed.abs().clamp(min=1e-8),
                    squared_error=error**2,
                    importance_weight=(logprobs - approximate).exp(),
                    behave_imp_weight=approximate_weights,
                    behave_imp_weight_abs_error=(approximate_weights - weights).abs(),
                )


def approximations(logprobs: Tensor, behaviour_logprobs: Tensor, share: Tensor) -> dict[str, Tensor]:
    """Return each approximation of the proximal log-probs, [tokens].

    "loglinear" interpolates log-probs, "linear" probabilities; "rollout" takes the engine's
    log-probs.
    """
    return {
        "loglinear": loglinear_proximal_logprobs(logprobs, behaviour_logprobs, share),
        "linear": torch.logaddexp(behaviour_logprobs + (1 - share).log(), logprobs + share.log()),
        "rollout": behaviour_logprobs,
    }


def log_versions(stats: Stats, batch: Batch, version: int) -> None:
    """Record the staleness of tokens and of rows under `version_stats/`.

    `v_proximal` is the version of the weights at the start of the step, `v_theta` that of the
    weights after it. The head of a row is its first sampled token, the tail its last; their
    versions differ if the weights were updated during the generation.

    Args:
        batch: token-aligned, `versions` and `loss_mask` [B, T].
        version: of the trainer's weights at the start of the step.
    """
    mask, staleness = batch["loss_mask"].bool(), version - batch["versions"]  # [B, T]
    of_head, of_tail = (staleness.gather(1, at[:, None])[:, 0] for at in first_and_last(mask))  # [B]
    with stats.scope("version_stats"):
        stats.scalar(v_proximal=version, v_theta=version + 1)
        stats.denominator(n_valid_generated_tokens=mask, n_generated_seqs=mask.any(1))
        stats.stat(
            "n_valid_generated_tokens",
            sample_staleness_proximal=staleness,
            sample_staleness_theta=staleness + 1,
        )
        stats.stat("n_generated_seqs", head_offpolicyness=of_head, tail_offpolicyness=of_tail)
