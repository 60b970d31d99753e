"""Values that are not finite, in packed rows and in the shards of a model's weights."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areal_core.batch import Batch


def count_nonfinite(logprobs: Tensor, flat: Batch) -> Tensor:
    """Return the number of values in the loss mask that are not finite, [] on their device.

    Args:
        logprobs: of the model, [tokens].
        flat: packed rows; per-token floats [tokens], per-row floats [rows].
    """
    mask = flat["loss_mask"].bool()
    columns = [logprobs, *(tensor for tensor in flat.values() if tensor.is_floating_point())]
    bad = [~column.isfinite() for column in columns]
    return torch.stack([(b & mask if b.shape == mask.shape else b).sum() for b in bad]).sum()


def largest_weight(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the largest absolute value of this rank's shards, []; NaN if they contain one."""
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    # A rank may have no rows of a small parameter.
    return torch.nn.utils.get_total_norm([s.detach() for s in shards if s.numel()], torch.inf)
