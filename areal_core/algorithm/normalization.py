"""Normalisation of rewards and advantages by the mean and std of the batch or the group.

Groups are identified by an id, not by the position of a row, so a group that lost a sample stays
one group. Sums are float64. A set with zero standard deviation carries no signal and becomes
exactly 0, never x / eps.

Ranks: `sum_over_ranks` sums a small float64 tensor over the data-parallel ranks, in place or not,
and returns it. It is called exactly two times if a level is "batch", whatever the data: a rank with
an empty mask calls it too, or the others would wait indefinitely. Groups do not span ranks and need
no call.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_core.algorithm.alignment import masked, segment_sum

WINDOW = 1024  # columns that are normalised at a time; a power of two
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
    column = values[:, None]  # [B, 1]
    return _normalize(
        column, torch.ones_like(column, dtype=torch.bool), group_ids, mean_level, std_level,
        leave_one_out, unbiased, eps, sum_over_ranks,
    )[:, 0]  # fmt: skip


def normalize_episodes(rewards: Tensor, group_ids: Tensor, episode_ids: Tensor) -> Tensor:
    """Normalise last rewards of episodes within groups: `(x - mean) / (std + 1e-8)`, [B] float32.

    Rows [B] of an episode, named by both ids, get the number of its last row; the standard
    deviation is that of the population of the group's episodes.
    """
    names, episodes = torch.stack([group_ids, episode_ids.long()], 1).unique(dim=0, return_inverse=True)
    rows = torch.arange(len(rewards), device=rewards.device)
    last = torch.zeros_like(names[:, 0]).scatter_reduce_(0, episodes, rows, "amax")  # [episodes]
    return normalize_groups(rewards[last], names[:, 0], unbiased=False, eps=1e-8)[episodes]


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
    rows = torch.zeros_like(mask[:, 0], dtype=torch.long) if group_ids is None else group_ids  # [B]
    return _normalize(
        values, mask.bool(), rows, mean_level, std_level, leave_one_out, unbiased, eps, sum_over_ranks
    )


@dataclass
class _Moments:
    """Moments of the set that each row belongs to; all [B, 1] float64."""

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
    mask: Tensor,
    group_ids: Tensor,
    mean_level: str | None,
    std_level: str | None,
    leave_one_out: bool,
    unbiased: bool,
    eps: float,
    sum_over_ranks: SumOverRanks,
) -> Tensor:
    """Normalise the masked values of [B, T], whose sets consist of rows: [B, T] float32."""
    groups = torch.unique(group_ids, return_inverse=True)[1]  # [B]
    levels, moments = {mean_level, std_level}, {}
    if "batch" in levels:
        moments["batch"] = _moments(values, mask, torch.zeros_like(groups), 1, sum_over_ranks)
    if "group" in levels:
        moments["group"] = _moments(values, mask, groups, len(groups), on_one_rank)

    def normal(values: Tensor) -> Tensor:
        if mean_level is not None:
            of_set = moments[mean_level]
            values = values - (of_set.mean_without_self(values) if leave_one_out else of_set.mean())
        return values if std_level is None else values / (moments[std_level].std(unbiased) + eps)

    # A set with zero standard deviation carries no signal; a nan stays visible.
    carries = mask if std_level is None else mask & (moments[std_level].squares != 0)
    normalized = torch.empty(values.shape, device=values.device)
    for window in _windows(values):
        normalized[:, window] = masked(normal(values[:, window].double()), carries[:, window])
    return normalized


def _moments(
    values: Tensor, mask: Tensor, sets: Tensor, num_sets: int, sum_over_ranks: SumOverRanks
) -> _Moments:
    """Moments in two passes: a sum of squares minus a square of sums would lose small variances.

    `sets` [B] numbers the set of each row.
    """
    counts = mask.view(torch.uint8).sum(1, dtype=torch.int32)  # faster than a sum of bools
    sums = [counts.double(), _row_sums(values, mask)]
    # Every rank reaches both collectives, also one without elements.
    count, total = sum_over_ranks(torch.stack([segment_sum(rows, sets, num_sets) for rows in sums]))
    mean = (total / count)[sets, None]  # [B, 1]
    deviations = _row_sums(values, mask, lambda values: (values - mean) ** 2)
    squares = sum_over_ranks(segment_sum(deviations, sets, num_sets))
    return _Moments(*(of_set[sets, None] for of_set in (count, total, squares)))


def _row_sums(
    values: Tensor, mask: Tensor, term: Callable[[Tensor], Tensor] = lambda values: values
) -> Tensor:
    """Sum `term` over the masked values of each row: [B] float64.

    Columns are added half to half, so that the bits do not depend on padding or on other rows.
    """
    total = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    for window in _windows(values):
        columns = masked(term(values[:, window].double()), mask[:, window])
        width = columns.shape[1]
        columns = torch.nn.functional.pad(columns, (0, (1 << (width - 1).bit_length()) - width))
        while columns.shape[1] > 1:
            left, right = columns.chunk(2, dim=1)
            columns = left + right
        total += columns[:, 0]
    return total


def _windows(values: Tensor) -> Iterator[slice]:
    """Slice the columns of [B, T]; a window's float64 copy fits into a processor's cache."""
    return (slice(start, start + WINDOW) for start in range(0, values.shape[1], WINDOW))
