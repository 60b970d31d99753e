"""Normalisation of rewards and advantages by the mean and std of the batch or the group.

Groups are identified by an id, not by the position of a row, so a group that lost a sample stays
one group. Sums are float64. A set with zero standard deviation carries no signal and becomes
exactly 0, never x / eps.

Ranks: `sum_over_ranks` sums a small float64 tensor over the data-parallel ranks, in place or not,
and returns it. It is called exactly two times if a level is "batch", whatever the data: a rank with
an empty mask calls it too, or the others would wait indefinitely. Groups do not span ranks and need
no call.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_core.algorithm.alignment import segment_sum

SumOverRanks = Callable[[Tensor], Tensor]


def on_one_rank(sums: Tensor) -> Tensor:
    """Return `sums`: the `sum_over_ranks` of a single process."""
    return sums


def normalize_groups(
    values: Tensor,
    group_ids: Tensor,
    *,
    mean_level: str | None = "group",
    std_level: str | None = "group",
    leave_one_out: bool = False,
    unbiased: bool = True,
    eps: float = 1e-5,
    sum_over_ranks: SumOverRanks = on_one_rank,
) -> Tensor:
    """Normalise one value per sequence: `(x - mean) / (std + eps)`, [B] float32.

    `group_ids` [B] integers: equal for the samples of one prompt (`prompt_id`). Levels are "batch",
    "group" or None (mean 0, or no division). GRPO (arXiv 2402.03300) sec. 4.1.2 is group and group;
    Dr.GRPO (2503.20783) omits the division; `leave_one_out` is the baseline of RLOO (2402.14740).
    """
    groups = torch.unique(group_ids, return_inverse=True)[1]  # [B]
    return _normalize(
        values, groups, mean_level, std_level, leave_one_out, unbiased, eps, sum_over_ranks
    ).float()


def normalize_tokens(
    values: Tensor,
    mask: Tensor,
    *,
    group_ids: Tensor | None = None,
    mean_level: str | None = "batch",
    std_level: str | None = "batch",
    leave_one_out: bool = False,
    unbiased: bool = True,
    eps: float = 1e-5,
    sum_over_ranks: SumOverRanks = on_one_rank,
) -> Tensor:
    """Normalise one value per token over the tokens in `mask`: [B, T] float32, 0 elsewhere.

    `group_ids` [B] is needed only for level "group", whose set is all masked tokens of a prompt's
    samples.
    """
    assert group_ids is not None or "group" not in (mean_level, std_level), "level group needs group_ids"
    mask = mask.bool()
    rows = torch.zeros_like(mask[:, 0], dtype=torch.long) if group_ids is None else group_ids  # [B]
    groups = torch.unique(rows, return_inverse=True)[1]
    token_groups = groups[:, None].expand_as(mask)[mask]  # [tokens]
    normal = _normalize(
        values[mask], token_groups, mean_level, std_level, leave_one_out, unbiased, eps, sum_over_ranks
    )
    return torch.zeros_like(values, dtype=torch.float32).masked_scatter(mask, normal.float())


@dataclass
class _Moments:
    """Moments of the set that each element belongs to; all [N] float64."""

    count: Tensor
    total: Tensor
    squares: Tensor  # sum of (x - mean)^2

    def mean(self) -> Tensor:
        return self.total / self.count

    def mean_without_self(self, values: Tensor) -> Tensor:
        """Mean of the other elements of the set; the element itself if there are none."""
        return torch.where(self.count > 1, (self.total - values) / (self.count - 1).clamp(min=1), values)

    def std(self, unbiased: bool) -> Tensor:
        return (self.squares / (self.count - int(unbiased)).clamp(min=1)).sqrt()


def _normalize(
    values: Tensor,
    groups: Tensor,
    mean_level: str | None,
    std_level: str | None,
    leave_one_out: bool,
    unbiased: bool,
    eps: float,
    sum_over_ranks: SumOverRanks,
) -> Tensor:
    """Normalise values [N] with group numbers [N]: [N] float64."""
    values = values.double()
    levels = {mean_level, std_level}
    moments = {}
    if "batch" in levels:
        moments["batch"] = _moments(values, torch.zeros_like(groups), sum_over_ranks)
    if "group" in levels:
        moments["group"] = _moments(values, groups, on_one_rank)
    centred = values
    if mean_level is not None:
        mean = moments[mean_level].mean_without_self(values) if leave_one_out else moments[mean_level].mean()
        centred = values - mean
    if std_level is None:
        return centred
    std = moments[std_level].std(unbiased)
    return torch.where(std == 0, 0.0, centred / (std + eps))  # a nan stays visible


def _moments(values: Tensor, sets: Tensor, sum_over_ranks: SumOverRanks) -> _Moments:
    """Moments in two passes: a sum of squares minus a square of sums would lose small variances."""
    num_sets = int(sets.max()) + 1 if sets.numel() else 1
    ones = torch.ones_like(values)
    # Every rank reaches both collectives, also one without elements.
    sums = sum_over_ranks(
        torch.stack([segment_sum(ones, sets, num_sets), segment_sum(values, sets, num_sets)])
    )
    count, total = sums[0], sums[1]  # [num_sets]
    deviations = values - (total / count)[sets]
    squares = sum_over_ranks(segment_sum(deviations**2, sets, num_sets))
    return _Moments(count[sets], total[sets], squares[sets])
