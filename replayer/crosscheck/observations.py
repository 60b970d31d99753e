"""What a record says of each stage of a step, beside the functions that recompute it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from replayer.crosscheck.options import Options
from replayer.crosscheck.step_rows import Bools, Floats, StepRows
from replayer.crosscheck.twin import (
    UNIT,
    Bounded,
    advantages_of,
    kl_rewards,
    mask_of,
    row_rewards,
    sum_error,
)

SMALLEST = 2.0**-126
OURS = "ppo_actor/"
# Statistics of the rewards of all rows, by trainer: ours, TRL's, verl's.
REWARD_STATISTICS = {
    f"{OURS}task_reward/avg": "avg", f"{OURS}task_reward/max": "max", f"{OURS}task_reward/min": "min",
    "reward": "avg", "critic/score/mean": "avg", "critic/score/max": "max", "critic/score/min": "min",
}  # fmt: skip


@dataclass(frozen=True)
class Observation:
    """Recorded values of a stage and how to recompute them.

    `recorded` is [N], [N, T] (then row i is row i of the step), or [] for a statistic; nan is not
    known.
    """

    stage: str
    name: str
    recorded: Floats
    recompute: Callable[[Options], Bounded]

    def misfit(self, found: Bounded) -> Floats:
        """Divide differences by what rounding to float32 allows: above 1, it explains nothing."""
        allowed = found.error + UNIT * np.abs(self.recorded) + SMALLEST
        with np.errstate(invalid="ignore"):
            misfit = np.abs(self.recorded - found.value) / allowed
        # a recomputed nan or inf fits nothing
        return np.where(np.isnan(self.recorded), 0.0, np.where(np.isnan(misfit), np.inf, misfit))


def observations_of(rows: StepRows) -> list[Observation]:
    """List what was recorded of the stages before the loss, in the order of computation."""
    found = [
        statistic(rows, "rewards", name, how, lambda _: own_rewards(rows))
        for name, how in REWARD_STATISTICS.items()
        if name in rows.stats
    ]
    found += mask_observations(rows)
    recorded = rows.tensors
    if "kl_rewards" in recorded:
        found.append(Observation("kl", "kl_rewards", recorded["kl_rewards"], partial(kl_rewards, rows)))
        if "total_rewards" in recorded:
            total = np.where(rows.mask, recorded["total_rewards"] - recorded["kl_rewards"], 0.0).sum(1)
            found.append(Observation("advantages", "normalised rewards", total, partial(terminal, rows)))
    if "advantages" in recorded:
        counted = where_counted(rows, recorded["advantages"])
        return [*found, Observation("advantages", "advantages", counted, partial(advantages_of, rows))]
    return found + [
        statistic(rows, "advantages", name, how, lambda o: advantages_of(rows, o).at(mask_of(rows, o)))
        for how in ("max", "min", "avg")
        if (name := f"{OURS}advantages/{how}") in rows.stats
    ]


def statistic(
    rows: StepRows, stage: str, name: str, how: str, values: Callable[[Options], Bounded]
) -> Observation:
    return Observation(
        stage, name, np.asarray(rows.stats[name]), lambda options: reduced(values(options), how)
    )


def own_rewards(rows: StepRows) -> Bounded:
    return Bounded(rows.rewards, np.zeros(len(rows.rewards)))


def terminal(rows: StepRows, options: Options) -> Bounded:
    """Return the normalised reward of each row with a token that counts, 0 of others."""
    found, counts = row_rewards(rows, options), mask_of(rows, options).any(1)
    size = np.abs(found.value) + np.abs(rows.tensors["kl_rewards"]).sum(1)
    return Bounded(np.where(counts, found.value, 0.0), found.error + 4 * UNIT * size)


def mask_observations(rows: StepRows) -> list[Observation]:
    found = []
    if f"{OURS}n_valid_tokens" in rows.stats:
        count = np.asarray(rows.stats[f"{OURS}n_valid_tokens"])
        found.append(Observation("mask", "n_valid_tokens", count, lambda o: exactly(mask_of(rows, o).sum())))
    if "advantages" in rows.tensors:
        advantages = where_counted(rows, rows.tensors["advantages"])
        has_any: Bools = np.asarray(np.nan_to_num(advantages).any(1))
        known = has_any[:, None] & ~np.isnan(advantages)
        found.append(
            Observation(
                "mask", "tokens with an advantage", np.where(known, advantages != 0, np.nan),
                lambda o: exactly(mask_of(rows, o)),
            )
        )  # fmt: skip
    return found


def where_counted(rows: StepRows, values: Floats) -> Floats:
    """Return values with nan at tool tokens: some trainers give one number for a whole row."""
    tools = mask_of(rows, Options(mask="everything after the prompt")) & ~rows.mask
    return np.where(tools, np.nan, values)


def exactly(values: object) -> Bounded:
    exact = np.asarray(values, np.float64)
    return Bounded(exact, np.zeros(exact.shape))


def reduced(values: Bounded, how: str) -> Bounded:
    """Reduce values of all rows or tokens to a statistic."""
    if how == "avg":
        count = max(values.value.size, 1)
        size = np.abs(values.value).sum() / count
        return Bounded(
            np.asarray(values.value.sum() / count),
            np.asarray(values.error.sum() / count + (sum_error(count) + 2 * UNIT) * size),
        )
    at = values.value.argmax() if how == "max" else values.value.argmin()
    return Bounded(np.asarray(values.value.flat[at]), np.asarray(values.error.max()))
