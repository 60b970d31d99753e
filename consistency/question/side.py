"""Examine one record's step: does its engine show a fault of its own?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from consistency.assumed import sampling_of
from consistency.candidates.stale_tensors import (
    LEAST_NATS,
    Fit,
    StaleTensors,
    find_stale_tensors,
    fit,
    mean_abs,
    nats_gained,
)
from consistency.case import DTYPES, Request, explain, likeliest
from consistency.check import check, refuse_other_vocabulary
from consistency.diagnose import is_accusation
from consistency.errors import NothingToCompare, OtherTokenizer
from consistency.hypotheses import replay, spread_rows, usable_or
from consistency.question.sampling_laws import DRAWN_AGAIN, Draws, Law, draws_of, find_law
from consistency.score import Scorer, load_scorer, score_logprobs
from consistency.source import Sampled, Sampling, model_dtype, parse_sampling, published_noise, read_step
from consistency.tokens import Floats, Sequences
from recorder import Record, RecordedStep

Confidence = Literal["high", "medium", "low"]
Kind = Literal["weights", "adapter", "sampling parameters", "seed", "tokenizer", "other", "none"]
CONFIDENCES: tuple[Confidence, ...] = ("low", "medium", "high")
BASE = "base"  # key of the model without its adapter
# Nats of a sure hypothesis; tokens of a sure one, and of a likely one.
SURE_NATS = 20.0
SURE_TOKENS, LIKELY_TOKENS = 32, 8
MOST_TOKENS = 8192
# Below this mean |difference| nothing is left to explain: rounding of float32.
EXACT = 1e-5
# A hypothesis explains a difference if it leaves at most this share of it, or noise.
UNEXPLAINED = 0.2
SAMPLING_CAUSES = ("R01", "R03", "R05", "R06")


@dataclass(frozen=True)
class Suspect:
    """A cause that a side's own log-probs and tokens show."""

    kind: Kind
    cause: str
    confidence: Confidence
    evidence: str


@dataclass(frozen=True)
class Examined:
    """The result of one side.

    Attributes:
        facts: what was seen, in one sentence.
        redrawn: the share of tokens that the recorded seed draws again under the options of the
            config; None where it cannot be known.
    """

    suspect: Suspect | None
    num_tokens: int
    facts: str
    redrawn: float | None = None


@dataclass(frozen=True)
class Tokens:
    """The tokens of one version of the weights, the options that should have sampled them."""

    record: Record
    step: RecordedStep
    rows: Sequences
    version: int
    sampling: Sampling
    models: Mapping[str, Path]

    @property
    def temperature(self) -> float:
        """Temperature of the log-probs; of greedy tokens they are of temperature 1."""
        return 1.0 if self.sampling.greedy else self.sampling.temperature

    @property
    def level(self) -> float:
        """The largest healthy mean |difference| of the precisions of both sides."""
        dtypes = (self.sampling.trainer_dtype, self.sampling.engine_dtype)
        return published_noise(dtypes, has_experts=False).mean_abs

    @property
    def law(self) -> Law:
        """The options of the config."""
        options = self.sampling
        return Law(self.temperature, options.top_p, options.top_k, options.greedy)

    def load(self, key: str) -> Scorer:
        """Load the weights of a key of `models`, in the trainer's dtype."""
        return load_scorer(str(self.models[key]), DTYPES[self.sampling.trainer_dtype])


def examine(record: Record, step: int, models: Mapping[str, Path]) -> Examined:
    """Examine the tokens of each version of which the weights are given; see `ask_engine`."""
    newest = max((int(key) for key in models if key != BASE), default=None)
    recorded = record.step(step)
    rows = read_step(recorded, record.header.trainer is not None)
    if not len(rows.scored) or newest is None:
        raise NothingToCompare(f"{record.path}: step {step} has no sampled tokens, or no weights were given")
    if rows.versions is None:
        rows = replace(rows, versions=np.full(len(rows.input_ids), newest))
    assert rows.versions is not None
    versions = [v for v in np.unique(rows.versions[rows.scored]).tolist() if str(v) in models]
    if not versions:
        raise NothingToCompare(
            f"{record.path}: step {step} was sampled by weights of version {int(rows.versions[rows.scored].max())}, "
            f"and those of {', '.join(models)} were given"
        )
    sampling = sampling_options(record, models[str(newest)])
    found = []
    for version in versions:
        of_version = replace(rows, sampled=rows.sampled & (rows.versions == version))
        found.append(
            examine_version(Tokens(record, recorded, limited(of_version), version, sampling, models))
        )
    suspects = [side for side in found if side.suspect is not None]
    if suspects:
        return max(suspects, key=lambda side: CONFIDENCES.index(side.suspect.confidence))  # type: ignore[union-attr]
    redrawn = [side.redrawn for side in found if side.redrawn is not None]
    return Examined(
        None,
        sum(side.num_tokens for side in found),
        "; ".join(side.facts for side in found),
        min(redrawn, default=None),
    )


def sampling_options(record: Record, model: Path) -> Sampling:
    """Return the sampling options of the run; of another trainer, as far as its config has them."""
    if record.header.config_is_ours:
        return parse_sampling(record)
    return sampling_of(record.header.config, {}, model_dtype(str(model)))[0]


def limited(rows: Sequences) -> Sequences:
    """Leave out the samples of evenly spread rows beyond `MOST_TOKENS`."""
    kept = np.isin(rows.row_of_token, spread_rows(rows, MOST_TOKENS))
    return replace(rows, sampled=rows.sampled & kept)


def examine_version(tokens: Tokens) -> Examined:
    rows, num_tokens = tokens.rows, len(tokens.rows.scored)
    now = tokens.load(str(tokens.version))
    try:
        refuse_other_vocabulary(rows, now)
    except OtherTokenizer as error:
        return Examined(Suspect("tokenizer", "another tokenizer", "high", str(error)), num_tokens, str(error))
    base = score_logprobs(now, rows, temperature=tokens.temperature)
    rows.engine_logprobs[rows.scored] = usable_or(rows.engine_logprobs[rows.scored], base)
    difference = mean_abs(rows.engine_logprobs[rows.scored] - base)
    facts = (
        f"{num_tokens} tokens of version {tokens.version}, log-probs as of its weights "
        f"(mean |difference| {difference:.2g})"
    )
    draws = draws_if_known(tokens, now)
    redrawn = None if draws is None else draws.share(tokens.law)
    if redrawn is not None:
        facts += f", {redrawn:.0%} of the tokens are those that the recorded seed draws"
    if difference < EXACT and redrawn is not None and redrawn >= DRAWN_AGAIN:
        return Examined(None, num_tokens, facts, redrawn)
    suspect, hint = suspect_weights(tokens, now, base)
    if suspect is None:
        suspect = suspect_options(tokens, now, draws)
    return Examined(suspect, num_tokens, facts + hint, None if suspect is not None else redrawn)


def suspect_weights(tokens: Tokens, now: Scorer, base: Floats) -> tuple[Suspect | None, str]:
    rows = tokens.rows
    engine = rows.engine_logprobs[rows.scored]
    earlier = sorted(
        (int(key) for key in tokens.models if key != BASE and int(key) < tokens.version), reverse=True
    )
    keys = [*map(str, earlier), *([BASE] if BASE in tokens.models else [])]
    if not keys:
        return None, ", no weights of versions before to compare with"
    predicted = {key: score_logprobs(tokens.load(key), rows, temperature=tokens.temperature) for key in keys}
    fits = [fit(key, engine, base, logprobs) for key, logprobs in predicted.items()]
    # Of equals (the base model is version 0 of an adapter), the adapter's absence is named.
    best = max(fits, key=lambda found: (round(found.nats, 3), found.name == BASE))
    left = min(best.residual, best.difference)
    stale: StaleTensors | None = None
    if earlier and left > EXACT:
        stale = find_stale_tensors(now, tokens.load(keys[0]), rows, tokens.temperature)
    if stale is not None and stale.fit.nats > max(best.nats, 0) + LEAST_NATS:
        cause = f"partial weights: {stale.describe()} of version {keys[0]} in the engine, {tokens.version} expected"
        return suspect_of(
            tokens,
            "weights",
            cause,
            stale.fit,
            f"with {len(stale.names)} of {stale.num_tensors} tensors of version {keys[0]}",
        ), ""
    if best.nats > LEAST_NATS:
        if best.name == BASE:
            return suspect_of(
                tokens, "adapter", "the adapter is missing in the engine", best, "of the base model"
            ), ""
        behind = tokens.version - int(best.name)
        cause = (
            f"stale weights: version {best.name} in the engine, {tokens.version} expected ({behind} behind)"
        )
        return suspect_of(tokens, "weights", cause, best, f"of version {best.name}"), ""
    moved = np.minimum(np.abs(predicted[keys[0]] - base), 5.0)
    visible = nats_gained(engine, base + moved, base)
    if visible < SURE_NATS:
        return (
            None,
            f"; weights of version {keys[0]} would change them by {moved.mean():.1g} only, too little to be seen",
        )
    return None, ""


def suspect_of(tokens: Tokens, kind: Kind, cause: str, found: Fit, weights: str) -> Suspect:
    evidence = (
        f"the log-probs are those {weights}: mean |difference| {found.residual:.2g}, with the expected weights "
        f"{found.difference:.2g} ({found.nats:.0f} nats likelier, {len(tokens.rows.scored)} tokens)"
    )
    explains = found.residual <= max(UNEXPLAINED * found.difference, tokens.level)
    confidence = by_evidence(found.nats, len(tokens.rows.scored))
    return Suspect(kind, cause, confidence if explains else at_most_medium(confidence), evidence)


def suspect_options(tokens: Tokens, now: Scorer, draws: Draws | None) -> Suspect | None:
    """Find the sampling options, or any other cause, that explain log-probs and tokens."""
    rows, num_tokens = tokens.rows, len(tokens.rows.scored)
    eos = now.model.config.get_text_config().eos_token_id
    replays = replay(now, rows, tokens.temperature, eos[0] if isinstance(eos, list) else eos)
    found = explain(replays, tokens.level)
    if found is not None and found.prediction.cause in SAMPLING_CAUSES:
        name, value = found.prediction.name, found.prediction.parameter
        evidence = (
            f"the log-probs are those of {name} {value:.4g}: mean |difference| {found.residual:.2g}, "
            f"{found.gain:.3g} times less than with the config's options ({len(replays.sample)} tokens)"
        )
        nats = nats_gained(replays.engine, replays.base, found.prediction.logprobs)
        cause = f"{name} {value:.3g} in the engine, not in the config ({describe_config(tokens, name)})"
        return Suspect("sampling parameters", cause, by_evidence(nats, num_tokens), evidence)
    if draws is not None and draws.share(tokens.law) < DRAWN_AGAIN:
        law, share = find_law(draws, tokens.law)
        if share >= DRAWN_AGAIN:
            evidence = (
                f"from the recorded seed, these options draw {share:.0%} of {len(draws.tokens)} tokens, those of the "
                f"config {draws.share(tokens.law):.0%}"
            )
            cause = f"{law.differences(tokens.law)} in the engine"
            return Suspect("sampling parameters", cause, by_tokens(len(draws.tokens)), evidence)
    drawn = None if tokens.sampling.greedy else likeliest(replays)
    if drawn is not None and drawn[1] > LEAST_NATS:
        transform, nats = drawn
        evidence = (
            f"the tokens are {nats:.0f} nats likelier under {transform.name} {transform.parameter:.3g} than under the "
            f"config's options, though their log-probs agree ({len(replays.sample)} tokens)"
        )
        option = f"{transform.name} {transform.parameter:.3g}"
        cause = f"tokens drawn with {option}, not in the config ({describe_config(tokens, transform.name)})"
        return Suspect("sampling parameters", cause, by_evidence(nats, num_tokens), evidence)
    if mean_abs(replays.engine - replays.base) > tokens.level:
        return suspect_other(tokens)
    return None


def describe_config(tokens: Tokens, name: str) -> str:
    options = vars(tokens.law)
    return f"{name} {options[name]}" if name in options else f"no {name}"


def suspect_other(tokens: Tokens) -> Suspect | None:
    sampled = Sampled({"step": tokens.rows}, tokens.sampling, tokens.version)
    model = str(tokens.models[str(tokens.version)])
    found = check(sampled, Request(model, dtype=tokens.sampling.trainer_dtype))
    for cause in found.diagnosis.causes:
        if is_accusation(cause):
            confidence: Confidence = "medium" if cause.confidence >= 0.85 else "low"
            return Suspect("other", cause.name, at_most_medium(confidence), cause.evidence)
    return None


def draws_if_known(tokens: Tokens, now: Scorer) -> Draws | None:
    """Compute what drew the tokens; None unless the embedded engine sampled them by itself."""
    header, config = tokens.record.header, tokens.record.header.config
    if not (header.allocation or "").startswith("embedded") or header.trainer is not None:
        return None
    if config["gconfig"]["min_new_tokens"] or "turns" in tokens.step.batch(0):  # of an agent's episodes
        return None
    ids = [
        tokens.step.batch(rank, ("sample_id",))["sample_id"] for rank in range(tokens.step.manifest.num_ranks)
    ]
    return draws_of(now, tokens.rows, np.concatenate(ids), int(config["seed"]))


def by_evidence(nats: float, num_tokens: int) -> Confidence:
    return by_tokens(num_tokens) if nats >= SURE_NATS else at_most_medium(by_tokens(num_tokens))


def by_tokens(num_tokens: int) -> Confidence:
    return "high" if num_tokens >= SURE_TOKENS else "medium" if num_tokens >= LIKELY_TOKENS else "low"


def at_most_medium(confidence: Confidence) -> Confidence:
    return "medium" if confidence == "high" else confidence
