"""Diagnose two columns of logprobs by structure, replayed hypotheses, shape and noise.

To the replayed sampling transforms it adds the hypotheses that need no logits: offset, units,
shift, mispaired rows, and other models.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from consistency.case import MIN_GAIN_OF_SQUARES, Case, Setting
from consistency.causes import Finding
from consistency.checks.numerics import THIN
from consistency.checks.recognise import CHECKS, in_logprobs, log_units
from consistency.checks.shape import MIN_SEGMENT
from consistency.measure import Measurement, measure
from consistency.rescoring import Rescoring, TrainerCheck
from consistency.score import Scores
from consistency.tensors import ChangedTensor
from consistency.tokens import Floats, Ints, Sequences, TokenTable, compare_tokens
from consistency.transforms import RESIDUAL_BOUND, Prediction, Replays, bounded, mean_square, of_some_rows

SHIFTS = (1, -1, 2, -2, 3, -3)
TOKENS_TO_PAIR = 24
CHANCE_SHARE = 0.5  # of a distance that chance leaves; above it, no rows are paired with others

CONFIDENT = 0.5


@dataclass(frozen=True)
class Diagnosis:
    """`verdict` is healthy, mismatch or unknown; `causes` come most likely first.

    `missing` lists data that would allow a more specific verdict.
    """

    verdict: str
    causes: tuple[Finding, ...]
    missing: tuple[str, ...]
    surprise: float
    table: TokenTable
    measurement: Measurement


def diagnose(
    sequences: Sequences,
    scores: Scores,
    setting: Setting,
    replays: Replays | None = None,
    alternatives: Sequence[Prediction] = (),
    rescoring: Rescoring | None = None,
    trainer_check: TrainerCheck | None = None,
    contradictions: Sequence[Finding] = (),
    changed_tensor: ChangedTensor | None = None,
) -> Diagnosis:
    """Compare an engine's logprobs with the trainer's and name the likely causes.

    `scores` and `replays` (`with_derived`) are of the sequences, `alternatives` of the tokens of
    `replays.sample` under other conditions. Without replays only structure and shape are examined.
    `contradictions` are findings of the replies alone.

    Raises:
        NothingToCompare: no token has a logprob on both sides.
    """
    findings: list[Finding] = list(contradictions)
    units = log_units(sequences.engine_logprobs[sequences.scored], scores.logprob)
    if units is not None:
        findings.append(units)
        sequences = replace(sequences, engine_logprobs=in_logprobs(units, sequences.engine_logprobs))
    table = compare_tokens(sequences, scores.logprob)
    if replays is not None:
        row = sequences.row_of_token[sequences.scored][replays.sample]
        replays = with_predictions(replays, row, alternatives)
    measurement = measure(table)
    case = Case(
        sequences, table, scores, measurement, setting, replays, rescoring, trainer_check, changed_tensor
    )
    findings += [finding for check in CHECKS if (finding := check(case)) is not None]
    faults = any(is_accusation(finding) for finding in findings)
    # Ordinary noise (R35), a policy that moved (R57) and declared dtypes (R38, R44) account for the difference.
    accounts = [found.confidence for found in findings if found.id in ("R35", "R38", "R44", "R57")]
    harmless = max(accounts, default=0.0) > THIN
    is_open = any(finding.fault for finding in findings)  # what is too open for an accusation
    verdict = "mismatch" if faults else "healthy" if harmless and not is_open else "unknown"
    causes = sorted(findings, key=lambda finding: (not is_accusation(finding), -finding.confidence))
    missing = () if verdict != "unknown" else missing_columns(case, alternatives)
    return Diagnosis(verdict, tuple(causes), missing, case.surprise(), table, case.measurement)


def is_accusation(finding: Finding) -> bool:
    """Return whether a finding alone makes the verdict a mismatch."""
    return finding.fault and finding.confidence >= CONFIDENT


def missing_columns(case: Case, alternatives: Sequence[Prediction]) -> tuple[str, ...]:
    given = {alternative.cause for alternative in alternatives}
    wanted = {
        "full logits: a model to score with (--model)": case.replays is None,
        "the checkpoint before this one (--previous), to recognise stale weights": "R24" not in given,
        "versions: the weight version of each token": case.sequences.versions is None,
        "worker: the engine that answered each sequence": case.sequences.worker is None,
        "cached_tokens: how much of each prompt came from the prefix cache": case.sequences.cached_tokens
        is None,
    }
    return tuple(name for name, absent in wanted.items() if absent)


def with_derived(replays: Replays, sequences: Sequences) -> Replays:
    """Add the predictions that follow from the model's own logprobs, without its logits."""
    row = sequences.row_of_token[sequences.scored][replays.sample]
    engine, base = replays.engine, replays.base
    offset = float(np.median(engine - base))
    place = np.concatenate([np.arange(count) for count in np.unique(row, return_counts=True)[1]])
    predictions = [
        forbidden_until_drawn(base, p, place) if p.cause == "R06" else p for p in replays.predictions
    ]
    predictions += [
        Prediction("R07", "constant", offset, base + offset),
        Prediction("R08", "logarithms to base 2", 1 / np.log(2), base / np.log(2)),
        Prediction("R08", "logarithms to base 10", 1 / np.log(10), base / np.log(10)),
        Prediction(
            "R08.cumulative", "sums of all logprobs up to the token", 0.0, by_row(base, row, np.cumsum)
        ),
        Prediction("R08.mean", "the mean of each row", 0.0, by_row(base, row, np.mean)),
        *(Prediction("R11", "shift", float(by), shifted(base, row, by)) for by in SHIFTS),
        *(from_a_place(engine, base, shifted(base, row, by), by, row) for by in SHIFTS),
        Prediction("R11.reversed", "rows in reversed order", 0.0, by_row(base, row, np.flip)),
        mispaired_rows(engine, base, row),
    ]
    return with_predictions(replace(replays, predictions=()), row, predictions)


def with_predictions(replays: Replays, row: Ints, added: Sequence[Prediction]) -> Replays:
    """Add predictions, and that of some rows alone by one cause of them if it fits better than the model."""
    engine, base = replays.engine, replays.base
    whole = sorted((p for p in added if not p.rows), key=lambda p: p.cause)
    groups = [list(group) for _, group in itertools.groupby(whole, key=lambda p: p.cause)]
    mixed = [found for group in groups if (found := of_some_rows(engine, base, row, group)) is not None]
    least = min(mixed, key=lambda p: mean_square(engine, p.logprobs), default=None)
    every = (*replays.predictions, *added)
    # Each row has a number of its own, which fits some rows by chance: the others must be right as well.
    if least is None or mean_square(engine, least.logprobs) * MIN_GAIN_OF_SQUARES > mean_square(engine, base):
        return replace(replays, predictions=every)
    return replace(replays, predictions=(*every, least))


def by_row(base: Floats, row: Ints, changed: Callable[[Floats], Any]) -> Floats:
    """Return what a function of a row's logprobs gives: one for each token, or one for all."""
    result = base.copy()
    for one in np.unique(row):
        result[row == one] = changed(base[row == one])
    return result


def shifted(base: Floats, row: Ints, by: int) -> Floats:
    """Return the logprob `by` tokens later in the same row, or the token's own at the row's end."""
    source = np.clip(np.arange(len(base)) + by, 0, len(base) - 1)
    return np.where(row[source] == row, base[source], base)


def mispaired_rows(engine: Floats, base: Floats, row: Ints) -> Prediction:
    """Predict each row's logprobs by those of the row that fits best.

    Among many short rows one always fits. So no row is paired unless rows fit clearly better than
    such rows do whose tokens are drawn from all rows, each at its place, and unless the logprobs
    at each place are those of the model in another order. `parameter` is the share of rows
    that another row fits best.
    """
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    ends = np.append(starts[1:], len(row))
    heads = np.full((2, len(starts), TOKENS_TO_PAIR), np.nan)
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        count = min(end - start, TOKENS_TO_PAIR)
        heads[0, index, :count] = engine[start : start + count]
        heads[1, index, :count] = base[start : start + count]
    partners, misses = best_partners(heads[0], heads[1])
    random = np.random.default_rng(0)
    drawn = heads[1].copy()
    for column in drawn.T:
        known = ~np.isnan(column)
        column[known] = random.permutation(column[known])
    _, by_chance = best_partners(heads[0], drawn)
    apart, in_order = (np.nanmean(np.abs(a - b)) for a, b in (heads, np.sort(heads, axis=1)))
    predicted = base.copy()
    if misses.mean() > CHANCE_SHARE * by_chance.mean() or in_order > CHANCE_SHARE * apart:
        return Prediction("R12", "mispaired rows", 0.0, predicted)
    for start, end, partner in zip(starts, ends, partners.tolist(), strict=True):
        count = min(end - start, ends[partner] - starts[partner])
        predicted[start : start + count] = base[starts[partner] : starts[partner] + count]
    moved = float((partners != np.arange(len(starts))).mean())
    return Prediction("R12", "mispaired rows", moved, predicted)


def best_partners(heads: Floats, candidates: Floats) -> tuple[Ints, Floats]:
    """Return the candidate nearest to each head, and their mean distance; both [rows, tokens]."""
    found = np.empty((2, len(heads)))
    for index, head in enumerate(heads):
        misses = np.minimum(np.abs(head - candidates), RESIDUAL_BOUND)
        means = np.where(np.isnan(misses), RESIDUAL_BOUND, misses)[:, ~np.isnan(head)].mean(1)
        found[:, index] = means.argmin(), means.min()
    return found[0].astype(np.int64), found[1]


def from_a_place(engine: Floats, base: Floats, later: Floats, by: int, row: Ints) -> Prediction:
    """Predict a shift of all tokens of a row from the place on which fits that row best.

    Most of these tokens must be nearer by it: one that is far off is so by some shift.
    """
    saved = bounded(engine - base) - bounded(engine - later)
    after = by_row(saved, row, lambda values: np.cumsum(values[::-1])[::-1])
    best, first = by_row(after, row, np.max), by_row(after, row, np.argmax)
    count = by_row(after, row, lambda values: np.arange(len(values)))
    name = "the logprobs from a token of each row on, shifted by"
    moved = (count >= first) & (best > 0)
    most = np.bincount(row, moved * np.sign(saved)) >= MIN_SEGMENT  # nearer ones, less those further away
    return Prediction("R11", name, float(by), np.where(moved & most[row], later, base))


def forbidden_until_drawn(base: Floats, everywhere: Prediction, place: Ints) -> Prediction:
    """EOS forbidden for the first `parameter` tokens of each row, up to its first place in any row.

    `parameter` is infinite if it was never drawn. Under the trainer's distribution this is likelier
    by more than n nats once in e^n times.
    """
    drawn = place[np.isneginf(everywhere.logprobs)]
    first = float(drawn.min()) if len(drawn) else np.inf
    predicted = np.where(place < first, everywhere.logprobs, base)
    return Prediction("R06", everywhere.name, first, predicted)
