"""Statistics of a step's batch in policy optimisation, and of the options that apply to it."""

import torch

from areal_core.algorithm.rewards import groups_without_spread
from areal_core.batch import Batch, sequence_lengths
from areal_core.config import PPOActorConfig
from areal_core.telemetry import Reduce, Stats


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
