"""Weighted terms of the loss, counters that go back, references that are replaced."""

import re
from collections.abc import Sequence

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.names import TEXTS, words_of
from areal_debug.doctor.read import Run, flat
from areal_debug.doctor.series import FEWEST_STEPS, Series

OF_LOSS = r"loss|penalty|term|bonus|reward|kl"
WEIGHT = r"coef|coeff|coefficient|weight|penalty|beta|alpha|ctl|factor"
NOT_A_TERM = r"ratio|frac|clip|count|num|std|var|min|time|lr|max|len|lengths|ppo|approx|rollout|mismatch"

BEYOND_NOISE = 3.0  # a small KL that scatters comes near 0 by chance
BESIDE, NOTHING_LEFT, LEAST_KL = 4, 0.05, 1e-4  # steps on each side; share of the KL; nats


def has(pattern: str, found: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, word) for word in found)


def weights(run: Run) -> dict[str, tuple[str, float]]:
    """Return the weight of each kind of term as it is configured, 0 where its switch is off."""
    every = dict(flat(run.record.header.config if run.record is not None else run.config))
    off = [words_of(name.rpartition(".")[2]) for name, value in every.items() if value is False]
    found: dict[str, tuple[str, float]] = {}
    for name, value in every.items():
        leaf = words_of(name.rpartition(".")[2])
        for kind, (_, of_option) in TEXTS["terms"].items():
            if has(of_option, leaf) and has(WEIGHT, leaf) and type(value) in (int, float):
                is_off = any(switch[:1] == ["use"] and has(of_option, switch) for switch in off)
                if not found.get(kind, ("", 0.0))[1]:
                    found[kind] = (name, 0.0 if is_off else float(value))
    return found


def configured(run: Run) -> dict[str, tuple[str, float]]:
    """Return the weights that are not 0."""
    return {kind: weight for kind, weight in weights(run).items() if weight[1]}


def weighted_terms(run: Run) -> dict[str, Series]:
    """Return the logged terms of the loss whose weight is configured, by a phrase with both."""
    found = {}
    for kind, (option, weight) in configured(run).items():
        for name, series in run.by_name.items():
            own, finite = words_of(name), series.finite
            is_term = has(TEXTS["terms"][kind][0], own) and has(OF_LOSS, own) and not has(NOT_A_TERM, own)
            if is_term and len(finite.values) >= FEWEST_STEPS:
                found[f"{name}, whose {option} is {weight:g}"] = finite
    return found


def version_goes_back(run: Run) -> Alarm | None:
    """D46: the counter of weight versions becomes smaller."""
    for name, series in run.by_name.items():
        found = words_of(name)
        if "version" not in found or has(r"stats|diff|lag|age|min|std|staleness|offpolicyness", found):
            continue
        steps, values = series.finite.steps, series.finite.values
        back = [at for at in range(1, len(values)) if values[at] < values[at - 1] - 0.5]
        if back and len(values) >= FEWEST_STEPS and len(back) <= len(values) // 4:
            at = back[0]
            return alarm(
                "D46",
                series,
                found=f"{name} is {values[at - 1]:g} at step {steps[at - 1]} and {values[at]:g} at step {steps[at]}",
                evidence=series.finite.at(range(max(0, at - 2), min(len(values), at + 3))),
                since=int(steps[at]),
            )
    return None


def reference_is_replaced(run: Run) -> Alarm | None:
    """D47: the KL to the reference falls to nothing in one step, and rises from there."""
    kl = run.finite("reference_kl")
    values = kl.values
    for at in range(BESIDE, len(values) - BESIDE):
        before, after = values[at - BESIDE : at], values[at : at + BESIDE]
        falls = after[0] < NOTHING_LEFT * before.min() and after.max() < before.min()
        if before.min() > max(LEAST_KL, BEYOND_NOISE * kl.noise) and falls:
            steps = kl.steps
            found = (
                f"{kl.name} is {np.median(before):.3g} before step {steps[at]}, {after[0]:.2g} there, "
                f"and {after[-1]:.2g} at step {steps[at + BESIDE - 1]}"
            )
            return alarm("D47", kl, found=found, evidence=kl.at(range(at - 2, at + 3)), since=int(steps[at]))
    return None


RULES = (version_goes_back, reference_is_replaced)
