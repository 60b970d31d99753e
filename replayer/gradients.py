"""Why a step, or a sample of it, has no gradient. Imports no torch.

An advantage is 0 where the rewards of a group are equal; a row without a token in the loss mask
trains on nothing. Both are common after a filter or an edit, and easy to miss: the loss is 0, the
optimizer still takes a step, and its moments still change the weights.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MASKED = "no token in the loss mask"
ALONE = "the only row of its group, whose mean is subtracted"
EQUAL = "all rewards of its group are equal"
ZERO = "advantage 0"
OTHER = "clipped, filtered or cancelled"


@dataclass(frozen=True)
class RowSignal:
    """What a row of a step gives to train on. `has_advantage`: one of its tokens has not 0."""

    prompt_id: int
    sample_id: int
    reward: float
    num_tokens: int
    has_advantage: bool


def row_signals(inputs: Mapping[str, Any]) -> list[RowSignal]:
    mask = inputs["loss_mask"].bool()
    has_advantage = (mask & (inputs["advantages"] != 0)).any(1)
    columns = (inputs["prompt_id"], inputs["sample_id"], inputs["rewards"], mask.sum(1), has_advantage)
    return [RowSignal(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def normalises_groups(actor: Mapping[str, Any]) -> bool:
    norms = [actor[name] for name in ("reward_norm", "adv_norm") if actor.get(name) is not None]
    return any(norm["mean_level"] == "group" for norm in norms)


def rewards_of_groups(rows: Iterable[RowSignal]) -> dict[int, list[float]]:
    groups = defaultdict(list)
    for row in rows:
        groups[row.prompt_id].append(row.reward)
    return groups


def why_no_signal(row: RowSignal, group: Sequence[float], by_group: bool) -> str | None:
    """Return why a row has no advantage to train on, a phrase; None if it has one.

    Args:
        group: rewards of all rows of its prompt.
        by_group: the mean of a group is subtracted.
    """
    if row.num_tokens == 0:
        return MASKED
    if row.has_advantage:
        return None
    if by_group and len(group) == 1:
        return ALONE
    if by_group and len(set(group)) == 1:
        return EQUAL
    return ZERO


def no_gradient_warnings(
    minibatches: Sequence[Sequence[RowSignal]],
    grad_norms: Sequence[float],
    num_planned: int,
    by_group: bool,
) -> tuple[str, ...]:
    """Return a sentence for each way in which a step learns less than its options say.

    Args:
        minibatches: rows of all ranks, by optimizer step. grad_norms: of these.
        num_planned: optimizer steps that the options ask for.
    """
    groups = rewards_of_groups(row for rows in minibatches for row in rows)
    found = []
    zero = [number for number, norm in enumerate(grad_norms) if norm == 0]
    if zero:
        rows = [row for number in zero for row in minibatches[number]]
        reasons = Counter(why_no_signal(row, groups[row.prompt_id], by_group) or OTHER for row in rows)
        counted = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        where = "" if len(zero) == len(grad_norms) else f" in minibatch {', '.join(map(str, zero))}"
        found.append(f"no gradient{where}: of {len(rows)} rows {counted}")
    if len(minibatches) < num_planned:
        count = sum(map(len, minibatches))
        found.append(
            f"{len(minibatches)} of {num_planned} optimizer steps: only {count} row{'s' * (count != 1)} left"
        )
    return tuple(found)
