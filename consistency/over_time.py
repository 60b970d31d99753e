"""How the gap between engine and trainer moves over a run, and what moves it; needs no model.

    steps ──> mean |D|, distances from the reference, by age ──> regressions ──> a cause

An engine that is frozen is near the first policy and far from the trainer; staleness grows with the
age of a token; deltas drift until the next full update; a partial load is one jump.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from consistency.causes import Finding, finding
from consistency.errors import NothingToCompare
from consistency.measure import NEGLIGIBLE
from consistency.tokens import Floats
from recorder import Record, RecordedStep
from recorder.errors import StepNotRecorded

FEWEST_STEPS = 5
HEALTHY = 0.02  # mean |D| of bfloat16; above it even a constant gap has a cause
NEAR = 0.2  # of the gap to the trainer: the engine has these weights
GROWS = 2.0  # last third over first
CLEAR = 4.0  # t of a slope
DROP = 0.5  # of the gap of the step before: a full update


@dataclass(frozen=True)
class StepGap:
    """Mean absolute differences of a step's tokens, NaN where a side is not known.

    `gap`: trainer and engine; `engine`: engine and reference; `trainer`: trainer and reference.
    `by_age`: (versions between sampling and training, mean gap, tokens).
    """

    step: int
    gap: float
    engine: float
    trainer: float
    by_age: tuple[tuple[int, float, int], ...]


@dataclass(frozen=True)
class Regression:
    """The gap against a quantity: slope, its t, share of the variance, number of values."""

    against: str
    slope: float
    t: float
    explained: float
    num: int


@dataclass(frozen=True)
class OverTime:
    """`verdict` is healthy, mismatch or unknown; `unobserved` has what would show more."""

    verdict: str
    causes: tuple[Finding, ...]
    regressions: tuple[Regression, ...]
    steps: tuple[StepGap, ...]
    unobserved: tuple[str, ...]


def gap_of(step: RecordedStep) -> StepGap | None:
    """Measure a step; None without log-probs of both sides."""
    ranks = [columns_of(step, rank) for rank in range(step.manifest.num_ranks)]
    engine, trainer, reference, age = (np.concatenate(parts) for parts in zip(*ranks, strict=True))
    difference = np.abs(trainer - engine)
    if not np.isfinite(difference).any():
        return None
    groups = {one: (age == one) & np.isfinite(difference) for one in np.unique(age[np.isfinite(age)])}
    ages = [(int(one), mean(difference[of]), int(of.sum())) for one, of in groups.items() if of.any()]
    distances = mean(np.abs(engine - reference)), mean(np.abs(trainer - reference))
    return StepGap(step.manifest.step, mean(difference), *distances, tuple(ages))


def columns_of(step: RecordedStep, rank: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the log-probs of engine, trainer and reference, and ages, of a rank; NaN where unknown."""
    arrays = step.batch(rank, ["logprobs", "loss_mask", "versions"])
    at = np.flatnonzero(arrays["loss_mask"])
    at = at[at > 0]
    unknown = np.full(len(at), np.nan)

    def known(name: str) -> Floats:
        return arrays[name].astype(np.float64)[at] if step.known(rank, name).all() else unknown

    trainer, reference = step.trainer_logprobs(rank), None
    with suppress(StepNotRecorded):
        reference = step.learning(rank, ["ref_logp"])["ref_logp"]
    own, of_first = (
        unknown if one is None else one.astype(np.float64)[at - 1] for one in (trainer, reference)
    )
    return known("logprobs"), own, of_first, step.manifest.version - 1 - known("versions")


def mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def regression(against: str, x: Floats, y: Floats, weights: Floats | None = None) -> Regression | None:
    """Fit a line by least squares. None for fewer than four values, or without spread."""
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    w = np.ones(len(x)) if weights is None else weights[known]
    if len(x) < 4 or np.ptp(x) == 0:
        return None
    w = w / w.sum()
    dx, dy = x - (w * x).sum(), y - (w * y).sum()
    slope = float((w * dx * dy).sum() / (w * dx**2).sum())
    left, total = float((w * (dy - slope * dx) ** 2).sum()), float((w * dy**2).sum())
    error = np.sqrt(max(left, 1e-30) / (w * dx**2).sum() / max(len(x) - 2, 1))
    return Regression(against, slope, float(slope / error), 1 - left / total if total else 0.0, len(x))


def examine(record: Record, steps: Sequence[int] | None = None) -> OverTime:
    """Measure every step and name what moves the gap.

    Raises NothingToCompare if fewer than `FEWEST_STEPS` steps have log-probs of both sides.
    """
    found = [gap_of(record.step(number)) for number in steps or record.steps]
    measured = tuple(one for one in found if one is not None)
    if len(measured) < FEWEST_STEPS:
        needed = "logprobs and old_logprobs that are not a copy"
        if len(measured) == len(found):
            needed = "more steps"
        elif record.header.trainer is None:
            needed = "debug.dump_scope=full and actor.recompute_logprob=true"
        raise NothingToCompare(
            f"{record.path}: {len(measured)} steps have log-probs of the engine and the trainer's own, "
            f"{FEWEST_STEPS} are needed: record with {needed}"
        )
    gap = np.array([one.gap for one in measured])
    of_trainer = np.array([one.trainer for one in measured])
    ages = [(age, value, count) for one in measured for age, value, count in one.by_age]
    since = since_drop(gap)
    columns = np.array(ages, np.float64).reshape(-1, 3).T
    lines = (
        regression("steps", np.arange(len(gap), dtype=np.float64), gap),
        regression("distance from the reference", of_trainer, gap),
        regression("age in versions", columns[0], columns[1], columns[2]),
        regression("updates since the gap last fell", since, gap) if since.max() < len(gap) - 1 else None,
    )
    regressions = {one.against: one for one in lines if one is not None}
    causes = tuple(one for one in judge(measured, gap, since, regressions) if one is not None)
    unobserved = []
    if not np.isfinite(of_trainer).any():
        unobserved.append("record ref_logprobs: whether the engine is frozen at the first weights")
    if not ages:
        unobserved.append("record versions: whether the gap follows the age of the tokens")
    unobserved.append("one step with --model, --previous and --base: which tensors differ")
    verdict = "mismatch" if any(cause.fault for cause in causes) else "healthy"
    return OverTime(verdict, causes, tuple(regressions.values()), measured, tuple(unobserved))


def since_drop(gap: Floats) -> Floats:
    """Number the steps since the gap last fell to half."""
    found = np.zeros(len(gap))
    for at in range(1, len(gap)):
        found[at] = 0 if gap[at] < DROP * gap[at - 1] and gap[at - 1] > NEGLIGIBLE else found[at - 1] + 1
    return found


def judge(
    steps: Sequence[StepGap], gap: Floats, since: Floats, lines: dict[str, Regression]
) -> list[Finding | None]:
    """Return the causes, the surest first."""
    if gap.max() < NEGLIGIBLE:
        return []
    third = max(1, len(gap) // 3)
    first, last = float(np.median(gap[:third])), float(np.median(gap[-third:]))
    tail = steps[-third:]
    near = [one.engine < NEAR * one.gap for one in tail if np.isfinite(one.engine)]
    span = {"from_step": steps[0].step, "to_step": steps[-1].step}
    shown: dict[str, Any] = {"first": first, "last": last} | span
    if near and all(near):
        engine = float(np.mean([one.engine for one in tail]))
        return [finding("R24.frozen", engine=engine, gap=last, **shown)]
    age = lines.get("age in versions")
    if age is not None and age.t > CLEAR and age.slope > 0 and age.explained > 0.3:
        fresh = [value for one in steps for years, value, _ in one.by_age if years == 0]
        if not fresh or np.mean(fresh) < 0.5 * gap.max():
            return [finding("R24.age", slope=age.slope, t=age.t, share=age.explained)]
    drops = int(((since == 0) & (np.arange(len(gap)) > 0)).sum())
    saw = lines.get("updates since the gap last fell")
    if drops > 1 and saw is not None and saw.t > CLEAR and last < GROWS**2 * first:
        return [finding("R24.drift", slope=saw.slope, t=saw.t, drops=drops)]
    rise = np.diff(gap)
    at = int(rise.argmax()) + 1
    before, after = gap[:at], gap[at:]
    is_jump = min(len(before), len(after)) > 1 and after.min() > GROWS * before.max()
    left, right = float(np.median(before)), float(np.median(after))
    if is_jump and rise.max() > 0.5 * (right - left):
        return [finding("R25.jump", step=steps[at].step, before=left, after=right)]
    line = lines.get("steps")
    if line is not None and line.t > CLEAR and last > GROWS * first and last > 10 * NEGLIGIBLE:
        return [finding("R24.grows", slope=line.slope, t=line.t, **shown)]
    return [finding("R24.constant", gap=last)] if last > HEALTHY else []


def document(found: OverTime) -> dict[str, Any]:
    """Return the report as JSON types."""
    return asdict(found) | {"confidence": found.causes[0].confidence if found.causes else None}
