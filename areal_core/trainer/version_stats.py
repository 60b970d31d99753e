"""How old a batch is: versions between the weights that sampled its tokens and those that train on them."""

import torch

from areal_core.batch import Batch
from areal_core.telemetry import Stats


def log_versions(stats: Stats, batch: Batch, version: int) -> None:
    """Ages of tokens and of rows under `version_stats/`.

    `v_proximal` are the weights at the start of the step, `v_theta` those that it makes. The head of a row is its first sampled token,
    the tail its last; they differ where weights were pushed in the middle of a generation.

    Args:
        batch: token-aligned, `versions` and `loss_mask` [B, T].
        version: of the trainer's weights at the start of the step.
    """
    trained, versions = batch["loss_mask"].bool(), batch["versions"].float()
    places = torch.arange(trained.shape[1]).expand_as(trained)
    head = places.masked_fill(~trained, trained.shape[1] - 1).amin(1, keepdim=True)  # [B, 1]
    tail = places.masked_fill(~trained, 0).amax(1, keepdim=True)
    with stats.scope("version_stats"):
        stats.scalar(v_proximal=version, v_theta=version + 1)
        stats.denominator(n_valid_generated_tokens=trained, n_generated_seqs=trained.any(1))
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
