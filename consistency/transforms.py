"""Hypothesis replay: compare the reported logprobs with those of each sampling transform.

Two criteria over the same transforms: the *residual* finds the transform that explains the reported
logprobs; the *likelihood* finds the one under which the sampled tokens are most likely, which
detects a truncated nucleus even if the reported logprobs equal the trainer's to the last digit.

A transform is a distribution that an engine may sample from or report: it takes `Rows` of full
logits and returns normalised log probabilities [rows, vocab], minus infinity for tokens that it
excludes.
"""

import copy
import tomllib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consistency.measure import NEGLIGIBLE
from consistency.score import TOKENS_PER_PASS, Scorer, predictors
from consistency.tokens import PER_ROW, ROUNDING_ABOVE_ZERO, Floats, Ints, Sequences, is_minus_infinity

# Full logits that a transform is tested on: 1,365 tokens of a vocabulary of 49 k; the screening, 341.
LOGITS_TO_REPLAY = 1 << 26
LOGITS_TO_SCREEN = 1 << 24
FEWEST_TOKENS = 256
MOST_TOKENS = 4096
ZOOMS = 2
ZOOM_POINTS = 9
RESIDUAL_BOUND = 5.0  # so that one token cannot decide
# Of a row's mean |D|, at most, left with the right prompt or images.
EXPLAINED = 0.2
# Nats that an excluded token costs: noise at the edge of a nucleus does not refute it.
FORBIDDEN_COST = 8.0
# A token that should have occurred so often, and never did, may be forbidden: by chance once in 3,000 tokens.
LEAST_EXPECTED = 8.0
MOST_NAMED = 8  # of them
# A transform that gains so many nats in the screening is tested on all tokens.
SCREENING_NATS = 2.0


@dataclass
class Rows:
    """Rows of logits, float32 [rows, vocab]; `uncapped` are those before the model's own soft cap.

    `seen` counts the earlier occurrences of each token in prompt and output, `seen_output` those in
    the output alone; int64 [rows, vocab].
    """

    logits: Tensor
    uncapped: Tensor
    temperature: float
    seen: Tensor
    seen_output: Tensor

    @cached_property
    def scaled(self) -> Tensor:
        """Logits divided by the temperature."""
        return self.logits / self.temperature

    @cached_property
    def order(self) -> Tensor:
        """Token ids, most likely first."""
        return self.scaled.argsort(dim=1, descending=True, stable=True)

    @cached_property
    def rank(self) -> Tensor:
        """Number of more likely tokens."""
        places = torch.arange(self.order.shape[1], device=self.order.device).expand_as(self.order)
        return torch.empty_like(self.order).scatter_(1, self.order, places)

    @cached_property
    def mass_before(self) -> Tensor:
        """Total probability of all more likely tokens."""
        sorted_probs = torch.softmax(self.scaled, 1).gather(1, self.order)
        before = sorted_probs.cumsum(1) - sorted_probs
        return torch.empty_like(before).scatter_(1, self.order, before)


Transform = Callable[[Rows], Tensor]


@dataclass(frozen=True)
class Family:
    """Transforms that differ in one number; the grid is refined around the points that fit best."""

    cause: str
    name: str
    transform: Callable[[Rows, float], Tensor]
    grid: Sequence[float]
    refine: bool = True


@dataclass(frozen=True)
class Prediction:
    """Logprobs of the tokens under one hypothesis, float64 [sample]; `parameter` may be without use.

    `rows` says of how many rows it holds, "" of all; `ids` are the tokens that it is about.
    """

    cause: str
    name: str
    parameter: float
    logprobs: Floats
    rows: str = ""
    ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class LogitSample:
    """Complete rows, few enough for full logits.

    `places` index the scored tokens; `hidden` [sample, dim] predicts them.
    """

    rows: Ints
    places: Ints
    tokens: Ints
    hidden: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Replays:
    """Every tested prediction; float64 [sample].

    `base` is the trainer's own logprob, which also replaces unusable ones in `engine`.
    """

    rows: Ints
    sample: Ints
    engine: Floats
    base: Floats
    predictions: tuple[Prediction, ...]


def replay(scorer: Scorer, sequences: Sequences, temperature: float, eos_token_id: int | None) -> Replays:
    """Screen all transforms on a subsample, test promising ones on the rest, refine their grids."""
    sample = select_sample(scorer, sequences)
    base = evaluate(scorer, sequences, sample, temperature, [as_is])[0]
    engine = usable_or(sequences.engine_logprobs[sample.tokens], base)

    def predict(
        tokens: LogitSample, tried: Sequence[Family], grids: Sequence[Sequence[float]]
    ) -> list[Prediction]:
        points = [(family, value) for family, grid in zip(tried, grids, strict=True) for value in grid]
        candidates: list[Transform] = [
            lambda rows, f=f, v=v: f.transform(rows, v)  # type: ignore[misc]
            for f, v in points
        ]
        values = evaluate(scorer, sequences, tokens, temperature, candidates)
        return [Prediction(f.cause, f.name, v, row) for (f, v), row in zip(points, values, strict=True)]

    stride = -(-len(sample.places) // tokens_within(LOGITS_TO_SCREEN, scorer.head.vocabulary_size))
    every = transform_families(eos_token_id)
    thinned = {name: values[::stride] for name, values in vars(sample).items() if name != "rows"}
    screened = predict(replace(sample, **thinned), every, [family.grid for family in every])
    row = sequences.row_of_token[sample.tokens]
    seen = engine[::stride], base[::stride], row[::stride]
    tried = [family for family in every if is_promising(family, screened, *seen)]
    predictions = predict(sample, tried, [family.grid for family in tried])
    for _ in range(ZOOMS):
        predictions += predict(sample, tried, [finer_grid(f, predictions, engine, base, row) for f in tried])
    evaluate_sample = partial(evaluate, scorer, sequences, sample, temperature)
    predictions += several_at_once(evaluate_sample, tried, predictions, engine, base)
    absent = absent_tokens(scorer, sample, temperature)
    if absent:
        name = f"{len(absent)} forbidden tokens ({', '.join(map(str, absent[:MOST_NAMED]))})"
        without = evaluate(scorer, sequences, sample, temperature, [lambda rows: forbidden(rows, absent)])[0]
        predictions.append(Prediction("R06.tokens", name, 0.0, without))
    bias = torch.zeros(0)
    if np.mean(np.abs(engine - base)) >= NEGLIGIBLE:
        bias = bias_of_tokens(scorer, sequences, replace(sample, **thinned), temperature, engine[::stride])
    if len(ids := torch.nonzero(bias)[:, 0].tolist()):
        name = f"a bias on the logits of {len(ids)} tokens ({', '.join(map(str, ids))})"
        moved = evaluate_sample([lambda rows: normalised(rows.scaled + bias.to(rows.scaled))])[0]
        predictions.append(Prediction("R26.bias", name, 0.0, moved, ids=frozenset(ids)))
    if scorer.model.dtype == torch.float32:
        low = replace(scorer, head=replace(scorer.head, layer=copy.deepcopy(scorer.head.layer).bfloat16()))
        multiplied = evaluate(low, sequences, sample, temperature, [as_is])[0]
        predictions.append(Prediction("R37", "an output layer in bfloat16", 0.0, multiplied))
    return Replays(sample.rows, sample.places, engine, base, tuple(predictions))


IN_ORDER = ("R05", "R01", "R03")  # in which engines apply them: penalties, temperature, truncation
GAIN_OF_ONE = 1.5  # of squares, by the best one alone
GAIN_OF_NEW = 1.2  # of squares, by one more of them, or by one more search
FEWEST_BIASED = 3.0  # tokens of an id, or as many by probability, of which a bias is fitted
BIAS_STEPS, BIAS_NATS = 4, 10.0  # of the fit, and by one more token
GAIN_OF_ALL = 1e3  # of squares, by one transform that leaves nothing to others


def several_at_once(
    values_of: Callable[[list[Transform]], Floats],
    families: Sequence[Family],
    predictions: Sequence[Prediction],
    engine: Floats,
    base: Floats,
) -> list[Prediction]:
    """Search transforms that act together, beginning with the one that fits best alone."""
    single = [(mean_square(engine, p.logprobs), p) for p in predictions if p.cause in IN_ORDER]
    least, first = min(single, key=lambda one: one[0], default=(0.0, None))
    share = least / max(mean_square(engine, base), 1e-12)
    if first is None or not 1 / GAIN_OF_ALL < share < 1 / GAIN_OF_ONE:
        return []
    # Of the two repetition penalties an engine has one.
    others = [
        one for one in families if one.name.split()[0] != first.name.split()[0] or one.name == first.name
    ]
    known = [family for cause in IN_ORDER for family in others if family.cause == cause]
    numbers, predicted, before = {first.name: first.parameter}, base, np.inf
    seen = {family.name: {*family.grid} for family in known}
    while least * GAIN_OF_NEW < before:
        before = least
        for family in known:
            is_new = family.name not in numbers
            grid = family.grid if is_new else near_number(seen[family.name], numbers[family.name])
            seen[family.name] |= {*grid}
            tried = [numbers | {family.name: number} for number in grid if is_new or family.refine]
            values = values_of([partial(one_after_another, known, one) for one in tried])
            for one, logprobs in zip(tried, values, strict=True):
                if (left := mean_square(engine, logprobs)) * (GAIN_OF_NEW if is_new else 1.0) < least:
                    numbers, predicted, least = one, logprobs, left
    parts = [family for family in known if family.name in numbers]
    name = " and ".join(f"{family.name} of about {numbers[family.name]:.2g}" for family in parts)
    return [Prediction(f"{parts[0].cause}.several", name, 0.0, predicted)] if len(parts) > 1 else []


def one_after_another(families: Sequence[Family], numbers: dict[str, float], rows: Rows) -> Tensor:
    """Apply transforms by the numbers of their names, each to the distribution of the one before."""
    logprobs = as_is(rows)
    for family in families:
        if family.name in numbers:
            logprobs = family.transform(rows, numbers[family.name])
            rows = replace(rows, logits=logprobs * rows.temperature)
    return logprobs


def bias_of_tokens(
    scorer: Scorer, sequences: Sequences, sample: LogitSample, temperature: float, engine: Floats
) -> Tensor:
    """Fit a bias on the scaled logits of few tokens, float64 [vocab]: the best one after the other.

    The log-prob of token x moves by (1 if k is x, else 0) - p(k) for a bias on token k.
    """
    step, labels = scorer.head.rows_at_a_time(scorer.device), sample.labels.cpu()
    chunks = [slice(at, at + step) for at in range(0, len(labels), step)]
    law = torch.cat(
        [as_is(logit_rows(scorer, sequences, sample, temperature, one)).cpu().double() for one in chunks]
    )
    wanted, at = torch.as_tensor(engine), torch.arange(len(labels))
    known = bias = law.new_zeros(law.shape[1])
    chosen, before = list[int](), float("inf")
    while True:
        missed = wanted - (law + bias).log_softmax(1)[at, labels]
        size = float(missed.square().sum())
        if len(chosen) > MOST_NAMED or not size * np.exp(2 * BIAS_NATS / len(labels)) < before:
            return known
        known, before = bias, size
        moves = -(law + bias).softmax(1)
        moves[at, labels] += 1
        found = (missed.clip(-RESIDUAL_BOUND, RESIDUAL_BOUND) @ moves) ** 2 / moves.square().sum(0)
        found[(moves.square().sum(0) < FEWEST_BIASED) | (bias != 0)] = 0
        chosen.append(int(found.argmax()))
        bias = bias.clone()
        for _ in range(BIAS_STEPS):
            moves = (labels[:, None] == torch.tensor(chosen)).double() - (law + bias).softmax(1)[:, chosen]
            missed = wanted - (law + bias).log_softmax(1)[at, labels]
            bias[chosen] += torch.linalg.lstsq(moves, missed[:, None]).solution[:, 0]


def absent_tokens(scorer: Scorer, sample: LogitSample, temperature: float) -> list[int]:
    """Return the ids that never occur in the sample and should have, by their total probability."""
    expected = torch.zeros(scorer.head.vocabulary_size, device=scorer.device)
    for hidden in sample.hidden.split(scorer.head.rows_at_a_time(scorer.device)):
        logits = scorer.head.cap(scorer.head.uncapped(hidden))
        expected += torch.softmax(logits / temperature, 1).sum(0)
    if scorer.processor is not None:  # rows are cut before a placeholder of an image that was sampled
        expected[scorer.processor.image_token_id] = 0.0
    expected[sample.labels] = 0.0
    ids = torch.nonzero(expected > LEAST_EXPECTED)[:, 0]
    return [int(one) for one in ids[expected[ids].argsort(descending=True)]]


def is_promising(
    family: Family, screened: Sequence[Prediction], engine: Floats, base: Floats, row: Ints
) -> bool:
    """Return whether a transform of the family beats the trainer's distribution by any criterion.

    The bar is far lower than that of an explanation.
    """
    if family.cause == "R06":  # EOS forbidden for the first tokens alone fits the others worse
        return True
    members = [p.logprobs for p in screened if p.name == family.name]
    likelier = max(likelihood(base, p) for p in members) > SCREENING_NATS
    return likelier or any(
        min(miss(engine, base, row, p) for p in members) < share * miss(engine, base, row, base)
        for miss, share in MISSES.items()
    )


def usable_or(engine: Floats, base: Floats) -> Floats:
    """Return the engine's logprobs, with the trainer's in place of unusable ones."""
    return np.where(
        np.isfinite(engine) & (engine <= ROUNDING_ABOVE_ZERO) & ~is_minus_infinity(engine), engine, base
    )


def finer_grid(
    family: Family, predictions: Sequence[Prediction], engine: Floats, base: Floats, row: Ints
) -> tuple[float, ...]:
    """Return points between the best grid points and their neighbours.

    The best by residual, by likelihood, and for some of the rows; empty for a family that is not
    refined.
    """
    if not family.refine:
        return ()
    members = [p for p in predictions if p.name == family.name]
    judged = [min(members, key=lambda p: miss(engine, base, row, p.logprobs)) for miss in MISSES]
    judged.append(max(members, key=lambda p: likelihood(base, p.logprobs)))
    known = {p.parameter for p in members}
    points = {point for best in judged for point in near_number(known, best.parameter)}
    return tuple(sorted(points - known))


def near_number(known: Collection[float], number: float) -> list[float]:
    """Return points between a number and its neighbours among those that were tried."""
    low = max((one for one in known if one < number), default=number)
    high = min((one for one in known if one > number), default=number)
    halves = (np.linspace(*ends, ZOOM_POINTS // 2 + 2) for ends in ((low, number), (number, high)))
    return np.concatenate(list(halves)).tolist()


def residual_size(engine: Floats, predicted: Floats) -> float:
    """Median |difference| of a prediction, plus 5 % of the bounded mean for the tail."""
    return float(residual_sizes(engine, predicted))


def residual_sizes(engine: Floats, predicted: Floats) -> Floats:
    size = np.minimum(np.abs(engine - predicted), RESIDUAL_BOUND)
    return np.median(size, -1) + 0.05 * size.mean(-1)


def bounded(difference: Floats) -> Floats:
    """Absolute differences, bounded; unusable ones count as 0."""
    return np.minimum(np.abs(np.nan_to_num(difference, posinf=0, neginf=0)), RESIDUAL_BOUND)


def mean_square(engine: Floats, predicted: Floats) -> float:
    """Bounded mean square of a prediction's difference, which the worst tokens dominate."""
    return float((np.minimum(np.abs(engine - predicted), RESIDUAL_BOUND) ** 2).mean())


ROWS_TO_TRY = 4  # before one of them is explained
LEAST_TO_WEIGH = 1e-5  # mean |D|; float32 kernels on CPUs differ by 1e-6


def row_means(engine: Floats, predicted: Floats, row: Ints) -> Floats:
    """Bounded mean |difference| of each row's tokens; 0 for rows without tokens."""
    return np.bincount(row, bounded(engine - predicted)) / np.maximum(np.bincount(row), 1)


def left_by_row(engine: Floats, base: Floats, row: Ints, predicted: Floats) -> float:
    """Mean |difference| of rows by the trainer's or the predicted logprobs, whichever fits each better."""
    return float(np.minimum(row_means(engine, base, row), row_means(engine, predicted, row)).mean())


def of_some_rows(engine: Floats, now: Floats, row: Ints, tried: Sequence[Prediction]) -> Prediction | None:
    """Give each row the prediction of one cause that explains it; None if none does, or one explains all."""
    places = [np.flatnonzero(row == one) for one in np.unique(row)]
    columns = np.array([now, *(p.logprobs for p in tried)])
    sizes = np.stack([residual_sizes(engine[at], columns[:, at]) for at in places], 1)
    own, best = sizes[0], sizes[1:].argmin(0)
    is_theirs = (sizes[1:].min(0) < EXPLAINED * own) & (own > LEAST_TO_WEIGH)
    moved, used = int(is_theirs.sum()), np.bincount(best[is_theirs], minlength=len(tried))
    if moved < 2 or used.max() == len(places):
        return None
    predicted = now.copy()
    for number in np.flatnonzero(is_theirs):
        predicted[places[number]] = tried[best[number]].logprobs[places[number]]
    rows = f"{moved} of {len(places)} rows"
    return replace(tried[int(used.argmax())], logprobs=predicted, rows=rows)


# What a prediction misses, and the share of what the trainer misses below which it is promising.
MISSES: dict[Callable[[Floats, Floats, Ints, Floats], float], float] = {
    lambda engine, base, row, predicted: residual_size(engine, predicted): 0.95,
    lambda engine, base, row, predicted: mean_square(engine, predicted): 0.9,
    left_by_row: 0.9,
}


def best_by_row(
    rows: Sequences, now: Floats, tried: Callable[[int, Ints], Iterable[Floats]], cause: str, name: str
) -> list[Prediction]:
    """Predict each bad row, the worst first, by what explains it best of what is tried for it.

    `tried` gets a row and the places of its tokens; if it explains none of the worst, that is all.
    """
    row, engine, predicted = rows.row_of_token[rows.scored], rows.engine_logprobs[rows.scored], now.copy()
    means, moved = row_means(engine, now, row), 0
    worst = np.argsort(-means, kind="stable")
    bad = worst[means[worst] > max(LEAST_TO_WEIGH, EXPLAINED**2 * means[worst[0]])].tolist()
    for number, one in enumerate(bad):
        if number == ROWS_TO_TRY and not moved:
            break
        places = np.flatnonzero(row == one)
        left, best = EXPLAINED * means[one], None
        for found in tried(one, places):
            if (apart := bounded(engine[places] - found).mean()) < left:
                left, best = apart, found
        if best is not None:
            predicted[places] = best
            moved += 1
    of = "" if moved == rows.num_rows else f"{moved} of {rows.num_rows} rows"
    return [Prediction(cause, name, 0.0, predicted, of)] if moved else []


def likelihood(base: Floats, predicted: Floats) -> float:
    """Return the log-likelihood gain over the trainer's distribution, in nats."""
    return float(np.maximum(predicted - base, -FORBIDDEN_COST).sum())


def select_sample(scorer: Scorer, sequences: Sequences, logits: int = LOGITS_TO_REPLAY) -> LogitSample:
    """Select rows of about so many logits, and compute the hidden states that predict their tokens."""
    limit = tokens_within(logits, scorer.head.vocabulary_size)
    row_of_place = sequences.row_of_token[sequences.scored]
    rows = spread_rows(sequences, limit)
    places = np.flatnonzero(np.isin(row_of_place, rows))
    selected = select_rows(sequences, rows)
    hidden = torch.empty(0)
    for at, states, _, _ in predictors(scorer, selected, TOKENS_PER_PASS):
        if not len(hidden):
            hidden = states.new_empty(len(places), states.shape[1])
        hidden[torch.as_tensor(at, device=states.device)] = states
    tokens = sequences.scored[places]
    return LogitSample(
        rows, places, tokens, hidden, torch.as_tensor(sequences.input_ids[tokens], device=scorer.device)
    )


def spread_rows(sequences: Sequences, num_tokens: int) -> Ints:
    """Pick evenly spread rows until they hold `num_tokens` scored tokens; ascending."""
    row_of_place = sequences.row_of_token[sequences.scored]
    counts = np.bincount(row_of_place, minlength=sequences.num_rows)
    spread = np.argsort((np.arange(sequences.num_rows) * 0.618034) % 1.0, kind="stable")
    return np.sort(spread[np.concatenate([[True], np.cumsum(counts[spread])[:-1] < num_tokens])])


def tokens_within(logits: int, vocabulary_size: int) -> int:
    return min(MOST_TOKENS, max(FEWEST_TOKENS, logits // vocabulary_size))


def select_rows(sequences: Sequences, rows: Ints) -> Sequences:
    """Select rows in the given order, with the columns that scoring reads."""
    tokens = np.concatenate([np.arange(*sequences.cu_seqlens[row : row + 2]) for row in rows])
    bounds = np.concatenate([[0], np.cumsum(np.diff(sequences.cu_seqlens)[rows])])
    per_row: dict[str, Any] = dict.fromkeys(PER_ROW)
    if sequences.worker is not None:
        per_row["worker"] = sequences.worker[rows]
    if sequences.images is not None:
        per_row["images"] = tuple(sequences.images[row] for row in rows)
    return sequences.of_tokens(tokens, bounds, **per_row)


def evaluate(
    scorer: Scorer,
    sequences: Sequences,
    sample: LogitSample,
    temperature: float,
    candidates: Sequence[Transform],
) -> Floats:
    """Compute logprobs of the sample under each transform, float64 [transforms, sample]."""
    result = np.empty((len(candidates), len(sample.places)))
    size = scorer.head.rows_at_a_time(scorer.device)
    for begin in range(0, len(sample.places), size):
        chunk = slice(begin, begin + size)
        rows = logit_rows(scorer, sequences, sample, temperature, chunk)
        for index, transform in enumerate(candidates):
            at_label = transform(rows).gather(1, sample.labels[chunk, None])[:, 0]
            result[index, chunk] = at_label.double().cpu().numpy()
    return result


def logit_rows(
    scorer: Scorer, sequences: Sequences, sample: LogitSample, temperature: float, chunk: slice
) -> Rows:
    uncapped = scorer.head.uncapped(sample.hidden[chunk])
    seen, seen_output = preceding_counts(sequences, sample.tokens[chunk], uncapped.shape[1])
    return Rows(
        scorer.head.cap(uncapped),
        uncapped,
        temperature,
        seen.to(uncapped.device),
        seen_output.to(uncapped.device),
    )


def preceding_counts(sequences: Sequences, tokens: Ints, vocabulary_size: int) -> tuple[Tensor, Tensor]:
    """Count each id in the row before each token.

    Returns:
        Counts over all tokens, and over sampled tokens alone; float32 [tokens, vocab].
    """
    seen = np.zeros((2, len(tokens), vocabulary_size), np.float32)
    begin = sequences.cu_seqlens[:-1][sequences.row_of_token[tokens]]
    for index, (start, token) in enumerate(zip(begin, tokens, strict=True)):
        ids = sequences.input_ids[start:token]
        seen[0, index] = np.bincount(ids, minlength=vocabulary_size)
        seen[1, index] = np.bincount(ids[sequences.sampled[start:token]], minlength=vocabulary_size)
    return torch.from_numpy(seen[0]), torch.from_numpy(seen[1])


def transform_families(eos_token_id: int | None) -> list[Family]:
    found = [Family(transform=one, **row) for one in TRANSFORMS for row in TABLE[one.__name__]]
    if eos_token_id is not None:
        found.append(Family("R06", "EOS forbidden", forbidden_token, (float(eos_token_id),), refine=False))
    return found


def normalised(scores: Tensor) -> Tensor:
    return torch.log_softmax(scores, 1)


def as_is(rows: Rows) -> Tensor:
    """The trainer's distribution: log_softmax(logits / temperature)."""
    return normalised(rows.scaled)


def largest_logprob(rows: Rows, _: float) -> Tensor:
    return as_is(rows).amax(1, keepdim=True).expand_as(rows.logits)


def negative_entropy(rows: Rows, _: float) -> Tensor:
    law = as_is(rows)
    return (law.exp() * law).sum(1, keepdim=True).expand_as(law)


def at_temperature(rows: Rows, temperature: float) -> Tensor:
    return normalised(rows.logits / temperature)


def divided(rows: Rows, temperature: float) -> Tensor:
    """Logprobs at temperature 1, divided by the temperature and not normalised again."""
    return normalised(rows.logits) / temperature


def _only(rows: Rows, kept: Tensor) -> Tensor:
    return normalised(rows.scaled.masked_fill(~kept, -torch.inf))


def top_p(rows: Rows, top_p: float) -> Tensor:
    """Nucleus sampling: the fewest tokens with total probability `top_p`, renormalised."""
    return _only(rows, rows.mass_before < top_p)


def top_k(rows: Rows, top_k: float) -> Tensor:
    """The `top_k` most likely tokens, renormalised."""
    return _only(rows, rows.rank < round(top_k))


def min_p(rows: Rows, min_p: float) -> Tensor:
    threshold = rows.scaled.amax(1, keepdim=True) + torch.log(torch.tensor(min_p))
    return _only(rows, rows.scaled >= threshold)


def repetition_penalty(rows: Rows, penalty: float, seen: Tensor | None = None) -> Tensor:
    """Divide positive and multiply negative logits of tokens in prompt or output (CTRL, 4.1).

    This is the penalty of vLLM and Transformers; `seen` counts other tokens.
    """
    choose = torch.minimum if penalty > 1 else torch.maximum  # torch.where takes six times as long
    penalised = choose(rows.logits / penalty, rows.logits * penalty)
    is_seen = (rows.seen if seen is None else seen) > 0
    return normalised(torch.where(is_seen, penalised, rows.logits) / rows.temperature)


def output_repetition_penalty(rows: Rows, penalty: float) -> Tensor:
    return repetition_penalty(rows, penalty, rows.seen_output)


def frequency_penalty(rows: Rows, penalty: float) -> Tensor:
    """Subtract `penalty` from a token's logit for each occurrence in the output."""
    return normalised((rows.logits - penalty * rows.seen_output) / rows.temperature)


def presence_penalty(rows: Rows, penalty: float) -> Tensor:
    return normalised((rows.logits - penalty * (rows.seen_output > 0)) / rows.temperature)


def forbidden_token(rows: Rows, token_id: float) -> Tensor:
    return forbidden(rows, [round(token_id)])


def forbidden(rows: Rows, ids: list[int]) -> Tensor:
    kept = torch.ones_like(rows.scaled, dtype=torch.bool)
    kept[:, ids] = False
    return _only(rows, kept)


def bfloat16_logits(rows: Rows, _: float = 0.0) -> Tensor:
    return normalised(rows.logits.bfloat16().float() / rows.temperature)


def soft_cap(rows: Rows, cap: float) -> Tensor:
    """cap * tanh(logits / cap) in place of the model's own cap; no cap if infinity."""
    capped = rows.uncapped if cap == float("inf") else cap * torch.tanh(rows.uncapped / cap)
    return normalised(capped / rows.temperature)


def padded_vocabulary(rows: Rows, num_padding: float) -> Tensor:
    total = rows.scaled.logsumexp(1, keepdim=True)
    padding = torch.log(torch.tensor(float(num_padding)))
    return rows.scaled - torch.logaddexp(total, padding)


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# Those of the table, in its order.
TRANSFORMS: tuple[Callable[[Rows, float], Tensor], ...] = (
    *(at_temperature, divided, top_p, top_k, min_p, repetition_penalty, output_repetition_penalty),
    *(frequency_penalty, presence_penalty, soft_cap, padded_vocabulary, largest_logprob, negative_entropy),
    bfloat16_logits,
)
