"""Staleness of a batch: versions between the weights that sampled it and those it trains."""

import torch

from areal_core.batch import Batch
from areal_core.telemetry import Stats


def log_versions(stats: Stats, batch: Batch, version: int) -> None:
    """Record the staleness of tokens and of rows under `version_stats/`.

    `v_proximal` is the version of the weights at the start of the step, `v_theta` that of the
    weights after it. The head of a row is its first sampled token, the tail its last; their
    versions differ if the weights were updated during the generation.

    Args:
        batch: token-aligned, `versions` and `loss_mask` [B, T].
        version: of the trainer's weights at the start of the step.
    """
    mask, versions = batch["loss_mask"].bool(), batch["versions"].float()
    positions = torch.arange(mask.shape[1]).expand_as(mask)  # [B, T]
    head = positions.masked_fill(~mask, mask.shape[1] - 1).amin(1, keepdim=True)  # [B, 1]
    tail = positions.masked_fill(~mask, 0).amax(1, keepdim=True)  # [B, 1]
    with stats.scope("version_stats"):
        stats.scalar(v_proximal=version, v_theta=version + 1)
        stats.denominator(n_valid_generated_tokens=mask, n_generated_seqs=mask.any(1))
        stats.stat(
            "n_valid_generated_tokens",
            sample_staleness_proximal=version - versions,
            sample_staleness_theta=version + 1 - versions,
        )
        stats.stat(
            "n_generated_seqs",
            head_offpolicyness=version - versions.gather(1, head)[:, 0],
            tail_offpolicyness=version - versions.gather(1, tail)[:, 0],
        )
