"""Statistics of agents' episodes in a batch: broken prefixes by reason, failures of the model."""

from collections import Counter

import torch
from torch import Tensor

from areal_core.agent.conversation import BRANCHES, BROKEN, RENDERED
from areal_core.agent.failures import FAILURES
from areal_core.data.batch import Batch
from areal_core.telemetry.stats import Reduce, Stats


def log_episodes(stats: Stats, batch: Batch) -> None:
    """Record the share of calls with a broken prefix, and of episodes that the model failed.

    `broken_prefix` is of the calls that continue an earlier one, `broken_prefix/REASON` of the same
    calls; `episode_failed` and `episode_failed/KIND` are of episodes. Nothing is recorded for a
    batch without a tree of calls.
    """
    if "branch" not in batch:
        return
    branch, failure = batch["branch"], batch["failure"]
    every = torch.ones(num_continuing(batch), dtype=torch.bool)
    is_root = branch == BRANCHES.index("root")
    stats.denominator(n_continuing_calls=every, n_episodes=is_root)
    broken = {name: int((branch == BRANCHES.index(name)).sum()) for name in BROKEN}
    for name, count in (("", sum(broken.values())), *broken.items()):
        share = (torch.arange(len(every)) < count).float()
        stats.stat("n_continuing_calls", Reduce.AVG, **{joined("broken_prefix", name): share})
    stats.stat("n_episodes", Reduce.AVG, episode_failed=(failure > 0).float())
    for number, kind in enumerate(FAILURES[1:], 1):
        failed = {joined("episode_failed", str(kind)): (failure == number).float()}
        stats.stat("n_episodes", Reduce.AVG, **failed)


def joined(name: str, detail: str) -> str:
    """Return `name/detail`, or `name` for all of them."""
    return f"{name}/{detail}" if detail else name


def num_continuing(batch: Batch) -> int:
    """Return the number of calls in the loss mask that continue an earlier one.

    A call without a token is not in the loss mask, though it may start a row.
    """
    starts = (batch["parent_turn"] < 0) | (batch["branch"] == BRANCHES.index("sub_agent"))
    return max(sum(len(turns) for turns in trained_turns(batch)) - int(starts.sum()), 0)


def trained_turns(batch: Batch) -> list[list[int]]:
    numbers: Tensor = batch["turns"] * batch["loss_mask"]  # 1 + the number of the call
    return [[int(number) - 1 for number in row.unique() if number > 0] for row in numbers]


def describe_broken(batch: Batch) -> str | None:
    """Return how many prefixes are broken, with the commonest reason; None if none are."""
    if "branch" not in batch:
        return None
    found = [
        (BRANCHES[branch], turns[0])
        for branch, turns in zip(batch["branch"].tolist(), trained_turns(batch), strict=True)
        if BRANCHES[branch] in BROKEN and turns
    ]
    if not found:
        return None
    (reason, count), *_ = Counter(reason for reason, _ in found).most_common()
    (turn, _), *_ = Counter(turn for name, turn in found if name == reason).most_common()
    advice = "; rollout.agent.chat_template_type=concat avoids it" if reason in RENDERED else ""
    return (
        f"{len(found)} of {num_continuing(batch)} calls that continue an earlier one do not begin with its exact "
        f"tokens, so a row ends there: {count} because {BROKEN[reason]}, most often in turn {turn}{advice} "
        f"(statistic rollout/broken_prefix)"
    )
