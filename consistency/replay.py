"""Hypothesis replay: what the engine would have reported under each law, against what it did report; and which law drew the tokens.

Two judgements over the same laws. The *residual* asks which law explains the reported logprobs. The *likelihood* asks under which law the
sampled tokens are likeliest, and so finds a truncated nucleus even where the reported logprobs agree with the trainer to the last digit.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from consistency import laws
from consistency.laws import Rows
from consistency.score import TOKENS_PER_PASS, Scorer, predictors
from consistency.tokens import ROUNDING_ABOVE_ZERO, Floats, Ints, Sequences, is_minus_infinity

# Numbers in the full logits that one law is tried on: 1,365 tokens of a vocabulary of 49 k, of which the first look takes 341.
LOGITS_TO_REPLAY = 1 << 26
LOGITS_TO_SCREEN = 1 << 24
FEWEST_TOKENS = 256
MOST_TOKENS = 4096
ZOOMS = 2
ZOOM_POINTS = 9
# A residual beyond this is as wrong as it gets; one token must not decide.
RESIDUAL_BOUND = 5.0
# A token that a law forbids costs so many nats: noise at the edge of a nucleus is no proof against it.
FORBIDDEN_COST = 8.0
# A law that makes the tokens of the first look so much likelier is tried on all.
LIKELIER_NATS = 2.0


@dataclass(frozen=True)
class Family:
    """Laws that differ in one number. Between grid points that fit best, the grid is refined."""

    cause: str
    name: str
    law: Callable[[Rows, float], Tensor]
    grid: tuple[float, ...]
    refine: bool = True


@dataclass(frozen=True)
class Prediction:
    """What the engine would have reported, float64 [sample], under one hypothesis."""

    cause: str
    name: str
    parameter: float
    logprobs: Floats


@dataclass(frozen=True)
class Sample:
    """Whole rows, few enough for full logits. `places` index the scored tokens; `hidden` [sample, dim] predicts them."""

    rows: Ints
    places: Ints
    tokens: Ints
    hidden: Tensor
    labels: Tensor


def families(eos_token_id: int | None) -> list[Family]:
    """The laws to try, simple ones first."""
    repetitions = (0.9, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0)
    temperatures = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5)
    found = [
        Family("R01", "temperature", laws.at_temperature, temperatures),
        Family("R03", "top_p", laws.top_p, (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995)),
        Family(
            "R03", "top_k", laws.top_k, (1, 2, 3, 5, 8, 10, 20, 30, 40, 50, 64, 80, 100, 200), refine=False
        ),
        Family("R03", "min_p", laws.min_p, (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)),
        Family("R05", "repetition_penalty", laws.repetition_penalty, repetitions),
        Family("R05", "repetition_penalty of output tokens", laws.output_repetition_penalty, repetitions),
        Family("R05", "frequency_penalty", laws.frequency_penalty, (-0.5, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0)),
        Family("R05", "presence_penalty", laws.presence_penalty, (-0.5, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0)),
        Family("R50", "final logit soft cap", laws.soft_cap, (2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0)),
        Family("R50", "no final logit soft cap", laws.soft_cap, (float("inf"),), refine=False),
        Family("R53", "vocabulary padding rows", laws.padded_vocabulary, tuple(4.0**k for k in range(10))),
    ]
    if eos_token_id is not None:
        found.append(Family("R06", "EOS forbidden", laws.without, (float(eos_token_id),), refine=False))
    return found


def take_sample(scorer: Scorer, sequences: Sequences) -> Sample:
    """The tokens of some rows, with what predicts them."""
    limit = tokens_within(LOGITS_TO_REPLAY, scorer.head.vocabulary_size)
    row_of_place = sequences.row_of_token[sequences.scored]
    rows = spread_rows(sequences, limit)
    places = np.flatnonzero(np.isin(row_of_place, rows))
    part = select_rows(sequences, rows)
    hidden = torch.empty(0)
    for at, states, _, _ in predictors(scorer, part, TOKENS_PER_PASS):
        if not len(hidden):
            hidden = states.new_empty(len(places), states.shape[1])
        hidden[torch.as_tensor(at, device=states.device)] = states
    tokens = sequences.scored[places]
    return Sample(
        rows, places, tokens, hidden, torch.as_tensor(sequences.input_ids[tokens], device=scorer.device)
    )


def spread_rows(sequences: Sequences, num_tokens: int) -> Ints:
    """Rows evenly spread over the batch, until they hold so many scored tokens; ascending."""
    row_of_place = sequences.row_of_token[sequences.scored]
    counts = np.bincount(row_of_place, minlength=sequences.num_rows)
    spread = np.argsort((np.arange(sequences.num_rows) * 0.618034) % 1.0, kind="stable")
    return np.sort(spread[np.concatenate([[True], np.cumsum(counts[spread])[:-1] < num_tokens])])


def tokens_within(logits: int, vocabulary_size: int) -> int:
    """Tokens whose full logits are so many numbers, but enough to judge by."""
    return min(MOST_TOKENS, max(FEWEST_TOKENS, logits // vocabulary_size))


def thinned(sample: Sample, stride: int) -> Sample:
    """Every `stride`-th token."""
    return Sample(
        sample.rows,
        sample.places[::stride],
        sample.tokens[::stride],
        sample.hidden[::stride],
        sample.labels[::stride],
    )


def select_rows(sequences: Sequences, rows: Ints) -> Sequences:
    """Some rows, in the given order, with the columns that scoring reads."""
    tokens = np.concatenate([np.arange(*sequences.cu_seqlens[row : row + 2]) for row in rows])
    bounds = np.concatenate([[0], np.cumsum(np.diff(sequences.cu_seqlens)[rows])])
    return Sequences(
        sequences.input_ids[tokens],
        bounds,
        sequences.sampled[tokens],
        sequences.engine_logprobs[tokens],
        worker=None if sequences.worker is None else sequences.worker[rows],
    )


Law = Callable[[Rows], Tensor]


def evaluate(
    scorer: Scorer, sequences: Sequences, sample: Sample, temperature: float, candidates: Sequence[Law]
) -> Floats:
    """Logprobs of the sampled tokens under each law, float64 [laws, sample]."""
    result = np.empty((len(candidates), len(sample.places)))
    size = scorer.head.rows_at_a_time(scorer.device)
    for begin in range(0, len(sample.places), size):
        part = slice(begin, begin + size)
        rows = rows_of(scorer, sequences, sample, temperature, part)
        for index, law in enumerate(candidates):
            at_label = law(rows).gather(1, sample.labels[part, None])[:, 0]
            result[index, part] = at_label.double().cpu().numpy()
    return result


def rows_of(scorer: Scorer, sequences: Sequences, sample: Sample, temperature: float, part: slice) -> Rows:
    """Full logits of some of the sample, with what came before each token."""
    uncapped = scorer.head.uncapped(sample.hidden[part])
    seen, seen_output = counts_before(sequences, sample.tokens[part], uncapped.shape[1])
    return Rows(
        scorer.head.cap(uncapped),
        uncapped,
        temperature,
        seen.to(uncapped.device),
        seen_output.to(uncapped.device),
    )


def counts_before(sequences: Sequences, tokens: Ints, vocabulary_size: int) -> tuple[Tensor, Tensor]:
    """How often each id occurs in its row before each token: everywhere, and among sampled tokens; int64 [tokens, vocab]."""
    seen = np.zeros((2, len(tokens), vocabulary_size), np.int64)
    begin = sequences.cu_seqlens[:-1][sequences.row_of_token[tokens]]
    for index, (start, token) in enumerate(zip(begin, tokens, strict=True)):
        ids = sequences.input_ids[start:token]
        seen[0, index] = np.bincount(ids, minlength=vocabulary_size)
        seen[1, index] = np.bincount(ids[sequences.sampled[start:token]], minlength=vocabulary_size)
    return torch.from_numpy(seen[0]), torch.from_numpy(seen[1])


def residual_size(engine: Floats, predicted: Floats) -> float:
    """How badly a prediction misses: the median, and a little of the bounded mean so that tails count."""
    size = np.minimum(np.abs(engine - predicted), RESIDUAL_BOUND)
    return float(np.median(size) + 0.05 * size.mean())


def mean_square(engine: Floats, predicted: Floats) -> float:
    """How badly a prediction misses, by the tokens that it misses most."""
    return float((np.minimum(np.abs(engine - predicted), RESIDUAL_BOUND) ** 2).mean())


def likelihood(base: Floats, predicted: Floats) -> float:
    """Nats by which a law makes the sampled tokens likelier than the trainer does."""
    return float(np.maximum(predicted - base, -FORBIDDEN_COST).sum())


@dataclass(frozen=True)
class Replays:
    """Every prediction tried; float64 [sample].

    `base` is the trainer's own logprob, which also stands in `engine` where that had no usable one; `rounding` is what bfloat16 logits
    would change; `largest` the logprob of the likeliest token.
    """

    rows: Ints
    sample: Ints
    engine: Floats
    base: Floats
    rounding: Floats
    largest: Floats
    predictions: tuple[Prediction, ...]


def replay(scorer: Scorer, sequences: Sequences, temperature: float, eos_token_id: int | None) -> Replays:
    """Try every law on a part of the sample, those that do any good on all of it, and finer steps around what fits best."""
    sample = take_sample(scorer, sequences)
    own = [laws.as_is, laws.bfloat16_logits, laws.likeliest]
    base, rounded, largest = evaluate(scorer, sequences, sample, temperature, own)
    engine = usable_or(sequences.engine_logprobs[sample.tokens], base)

    def predict(
        part: Sample, tried: Sequence[Family], grids: Sequence[tuple[float, ...]]
    ) -> list[Prediction]:
        points = [(family, value) for family, grid in zip(tried, grids, strict=True) for value in grid]
        candidates: list[Law] = [lambda rows, f=f, v=v: f.law(rows, v) for f, v in points]  # type: ignore[misc]
        values = evaluate(scorer, sequences, part, temperature, candidates)
        return [Prediction(f.cause, f.name, v, row) for (f, v), row in zip(points, values, strict=True)]

    stride = -(-len(sample.places) // tokens_within(LOGITS_TO_SCREEN, scorer.head.vocabulary_size))
    every = families(eos_token_id)
    screened = predict(thinned(sample, stride), every, [family.grid for family in every])
    tried = [family for family in every if does_good(family, screened, engine[::stride], base[::stride])]
    predictions = predict(sample, tried, [family.grid for family in tried])
    for _ in range(ZOOMS):
        predictions += predict(sample, tried, [finer_grid(f, predictions, engine, base) for f in tried])
    return Replays(sample.rows, sample.places, engine, base, rounded - base, largest, tuple(predictions))


def does_good(family: Family, screened: Sequence[Prediction], engine: Floats, base: Floats) -> bool:
    """Whether a law of the family looks better than the trainer's own, by either judgement: far less is asked than of an explanation."""
    if family.cause == "R06":  # forbidden for the first tokens alone, it does harm to the others
        return True
    own = [p.logprobs for p in screened if p.name == family.name]
    explains = min(residual_size(engine, p) for p in own) < 0.95 * residual_size(engine, base)
    squares = min(mean_square(engine, p) for p in own) < 0.9 * mean_square(engine, base)
    return explains or squares or max(likelihood(base, p) for p in own) > LIKELIER_NATS


def usable_or(engine: Floats, base: Floats) -> Floats:
    """The engine's logprobs; the trainer's where it gave none that can be compared."""
    return np.where(
        np.isfinite(engine) & (engine <= ROUNDING_ABOVE_ZERO) & ~is_minus_infinity(engine), engine, base
    )


def finer_grid(
    family: Family, predictions: Sequence[Prediction], engine: Floats, base: Floats
) -> tuple[float, ...]:
    """Points around the family's best by residual and by likelihood, between their neighbours; none where it is not refined."""
    if not family.refine:
        return ()
    own = sorted((p for p in predictions if p.name == family.name), key=lambda p: p.parameter)
    judged = (
        min(range(len(own)), key=lambda i: residual_size(engine, own[i].logprobs)),
        max(range(len(own)), key=lambda i: likelihood(base, own[i].logprobs)),
    )
    known = {p.parameter for p in own}
    points: set[float] = set()
    for best in judged:
        ends = (
            own[max(best - 1, 0)].parameter,
            own[best].parameter,
            own[min(best + 1, len(own) - 1)].parameter,
        )
        for low, high in itertools.pairwise(ends):
            points |= set(np.linspace(low, high, ZOOM_POINTS // 2 + 2).tolist())
    return tuple(sorted(points - known))
