"""What a step's batch of policy optimisation looked like."""

import torch

from areal_core.algorithm.rewards import groups_without_spread
from areal_core.batch import Batch, sequence_lengths
from areal_core.telemetry import Reduce, Stats


def log_batch(stats: Stats, batch: Batch, inputs: Batch) -> None:
    """Rewards, lengths and advantages, under the names of the actor; `inputs` as of `PolicyObjective.learning_inputs`."""
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
