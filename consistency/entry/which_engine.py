"""Find the engine at fault where two records differ though weights, seed and prompts are equal.

    each side:  tokens ─> prompts equal? ─> log-probs under the weights of each token's version
                 ─> of versions before, of the base model, with some tensors of before?  stale_tensors
                 ─> of another temperature, truncation, penalty?                         sampling_laws
                 ─> tokens that the recorded seed draws (embedded engine)?
                 ─> any other cause that `check` knows
    both sides: one has a cause ─> that side │ none ─> neither, the tokens differ by chance

A side is accused only for what its own log-probs and tokens show; that the other side differs is no
evidence against it.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from areal_core.embedded.generate import draw, draw_uniforms
from areal_core.rollout.types import TOP_K_OFF, ModelRequest, row_seed
from areal_core.rollout.types import Sampling as RequestSampling
from consistency.case import DTYPES, Request, explain, likeliest
from consistency.check import check, refuse_other_vocabulary
from consistency.diagnose import is_accusation
from consistency.errors import NothingToCompare, OtherModel
from consistency.score import Scorer, load_scorer, score_logprobs
from consistency.source import (
    Sampled,
    Sampling,
    model_dtype,
    parse_sampling,
    published_noise,
    read_step,
    sampling_of,
)
from consistency.tensors import LEAST_NATS, Fit, StaleTensors, find_stale_tensors, fit, nats_gained
from consistency.tokens import Floats, Ints, Sequences
from consistency.transforms import Prediction, Replays, bounded, replay, select_sample, spread_rows, usable_or
from recorder import Record, RecordedStep
from recorder.tables.columns import prompt_lengths

# The share of tokens that the right options draw again: rounding at the bounds of a token's share
# of [0, 1) changes some.
DRAWN_AGAIN = 0.97
LOGITS_TO_DRAW = 1 << 21
DIGITS = (1, 2, 4)  # of options that are tried
OPTIONS: dict[str, Callable[[float], Any]] = {"temperature": float, "top_p": float, "top_k": round}


def differences(law: Sampling, config: Sampling) -> str:
    """Describe what differs from the options of the config."""
    return ", ".join(
        f"{name} {describe(value)} (config: {describe(getattr(config, name))})"
        for name, value in vars(law).items()
        if value != getattr(config, name)
    )


def describe(value: float | int | bool | None) -> str:
    """Write the value of an option."""
    return "no limit" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Draws:
    """Tokens of an embedded engine with what drew them: logits [n, vocab], float64 uniforms [n]."""

    logits: torch.Tensor
    tokens: torch.Tensor
    uniforms: torch.Tensor

    def share(self, law: Sampling) -> float:
        """Share of the tokens that the law draws again."""
        if law.greedy:
            return float((self.logits.argmax(1) == self.tokens).double().mean())
        probs = (self.logits / law.temperature).log_softmax(-1).exp()
        top_k = torch.full((len(probs),), TOP_K_OFF if law.top_k is None else law.top_k)
        drawn = draw(probs, self.uniforms, top_k, torch.full((len(probs),), law.top_p))
        return float((drawn == self.tokens).double().mean())


def draws_of(scorer: Scorer, sequences: Sequences, sample_ids: Ints, seed: int) -> Draws:
    """Compute the logits of some rows, and the random numbers that drew their tokens.

    The sequences are of the scorer's version of the weights; `seed` is that of the run.
    """
    sample = select_sample(scorer, sequences, LOGITS_TO_DRAW)
    logits = scorer.head.cap(scorer.head.uncapped(sample.hidden)).cpu()
    assert sequences.prompt_id is not None
    assert sequences.versions is not None
    version = int(sequences.versions[sequences.scored[0]])
    uniforms = [
        value
        for row in sample.rows.tolist()
        for value in uniforms_of_row(
            sequences.sampled[sequences.row(row)],
            seed,
            version,
            {"prompt_id": int(sequences.prompt_id[row]), "sample_id": int(sample_ids[row])},
        )
    ]
    return Draws(logits, sample.labels.cpu(), torch.tensor(uniforms, dtype=torch.float64))


def uniforms_of_row(sampled: np.ndarray, seed: int, version: int, name: dict[str, int]) -> Iterator[float]:
    """Yield the random number of each sampled token; a turn is a span of sampled tokens."""
    spans = [len(list(group)) for is_sampled, group in itertools.groupby(sampled) if is_sampled]
    for turn, length in enumerate(spans):
        request = ModelRequest(input_ids=[], sampling=RequestSampling(), metadata=name | {"turn": turn})
        yield from draw_uniforms(row_seed(seed, version, request), length).tolist()


def find_law(draws: Draws, config: Sampling, replays: Replays) -> tuple[Sampling, float]:
    """Return the options that draw the most tokens again, one of them other than in the config."""
    laws = [config, replace(config, greedy=not config.greedy)]
    for p in replays.predictions:
        if p.name in OPTIONS:
            values = {round(p.parameter, digits) for digits in DIGITS}
            laws += [replace(config, **{p.name: OPTIONS[p.name](value)}) for value in values]
    # Of equals, the roundest number: the options draw the same tokens in a range.
    tried = {law: (draws.share(law), -len(f"{law.temperature:.6g} {law.top_p:.6g}")) for law in laws}
    law = max(tried, key=lambda law: tried[law])
    return law, tried[law][0]


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
    def law(self) -> Sampling:
        """The options of the config, with the temperature of the log-probs."""
        return replace(self.sampling, temperature=self.temperature)

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
    if record.header.config_is_ours:
        sampling = parse_sampling(record)
    else:  # of another trainer, as far as its config has them
        sampling = sampling_of(record.header.config, {}, model_dtype(str(models[str(newest)])))[0]
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


def limited(rows: Sequences) -> Sequences:
    """Leave out the samples of evenly spread rows beyond `MOST_TOKENS`."""
    kept = np.isin(rows.row_of_token, spread_rows(rows, MOST_TOKENS))
    return replace(rows, sampled=rows.sampled & kept)


def examine_version(tokens: Tokens) -> Examined:
    rows, num_tokens = tokens.rows, len(tokens.rows.scored)
    now = tokens.load(str(tokens.version))
    try:
        refuse_other_vocabulary(rows, now)
    except OtherModel as error:
        return Examined(Suspect("tokenizer", "another tokenizer", "high", str(error)), num_tokens, str(error))
    base = score_logprobs(now, rows, temperature=tokens.temperature)
    rows.engine_logprobs[rows.scored] = usable_or(rows.engine_logprobs[rows.scored], base)
    difference = bounded(rows.engine_logprobs[rows.scored] - base).mean()
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
        which = f"with {len(stale.names)} of {stale.num_tensors} tensors of version {keys[0]}"
        return suspect_of(tokens, "weights", cause, stale.fit, which), ""
    if best.nats > LEAST_NATS:
        if best.name == BASE:
            cause = "the adapter is missing in the engine"
            return suspect_of(tokens, "adapter", cause, best, "of the base model"), ""
        behind = tokens.version - int(best.name)
        cause = (
            f"stale weights: version {best.name} in the engine, {tokens.version} expected ({behind} behind)"
        )
        return suspect_of(tokens, "weights", cause, best, f"of version {best.name}"), ""
    moved = np.minimum(np.abs(predicted[keys[0]] - base), 5.0)
    if nats_gained(engine, base + moved, base) < SURE_NATS:
        change = f"{moved.mean():.1g} only, too little to be seen"
        return None, f"; weights of version {keys[0]} would change them by {change}"
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
    rows = tokens.rows
    eos = now.model.config.get_text_config().eos_token_id
    replays = replay(now, rows, tokens.temperature, eos[0] if isinstance(eos, list) else eos)
    found, count = explain(replays, tokens.level), f"({len(replays.sample)} tokens)"
    if found is not None and found.prediction.cause in SAMPLING_CAUSES:
        p, nats = found.prediction, nats_gained(replays.engine, replays.base, found.prediction.logprobs)
        evidence = (
            f"the log-probs are those of {p.name} {p.parameter:.4g}: mean |difference| {found.residual:.2g}, "
            f"{found.gain:.3g} times less than with the config's options {count}"
        )
        return suspect_transform(tokens, "{option} in the engine, not in the config", p, nats, evidence)
    if draws is not None and draws.share(tokens.law) < DRAWN_AGAIN:
        law, share = find_law(draws, tokens.law, replays)
        if share >= DRAWN_AGAIN:
            evidence = (
                f"from the recorded seed, these options draw {share:.0%} of {len(draws.tokens)} tokens, those of the "
                f"config {draws.share(tokens.law):.0%}"
            )
            cause = f"{differences(law, tokens.law)} in the engine"
            return Suspect("sampling parameters", cause, by_tokens(len(draws.tokens)), evidence)
    drawn = None if tokens.sampling.greedy else likeliest(replays)
    if drawn is not None and drawn[1] > LEAST_NATS:
        p, nats = drawn
        evidence = (
            f"the tokens are {nats:.0f} nats likelier under {p.name} {p.parameter:.3g} than under the config's options, "
            f"though their log-probs agree {count}"
        )
        return suspect_transform(tokens, "tokens drawn with {option}, not in the config", p, nats, evidence)
    if bounded(replays.engine - replays.base).mean() > tokens.level:
        return suspect_other(tokens)
    return None


def suspect_transform(tokens: Tokens, cause: str, p: Prediction, nats: float, evidence: str) -> Suspect:
    options, said = vars(tokens.law), cause.format(option=f"{p.name} {p.parameter:.3g}")
    config = f"{p.name} {options[p.name]}" if p.name in options else f"no {p.name}"
    confidence = by_evidence(nats, len(tokens.rows.scored))
    return Suspect("sampling parameters", f"{said} ({config})", confidence, evidence)


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


@dataclass(frozen=True)
class EngineAnswer:
    """Which engine is at fault: A (left), B (right), both, or None as far as is seen.

    `kind` is a class of causes, `cause` says it in words; `evidence` holds one sentence each.
    """

    side: Literal["A", "B", "both"] | None
    kind: Kind
    cause: str
    confidence: Confidence
    evidence: tuple[str, ...]


def ask_engine(left: Record, right: Record, step: int, models: Mapping[str, Path]) -> EngineAnswer:
    """Decide whose engine explains that two records sampled differently in a step.

    Args:
        models: checkpoints by version of the weights ("7" are those that step 7 of a run from 0
            trains, and that should sample for it), and "base", the model without its adapter.
            Versions before are compared as far as they are given.

    Raises:
        NothingToCompare: a record has no sampled tokens, or no weights of their version are given.
        ModelError, RecordError: a checkpoint or step cannot be read.
    """
    other_prompts = compare_prompts(left, right, step)
    if other_prompts is not None:
        return other_prompts
    return decide(examine(left, step, models), examine(right, step, models))


def decide(left: Examined, right: Examined) -> EngineAnswer:
    facts = (f"A: {left.facts}", f"B: {right.facts}")
    one, other = left.suspect, right.suspect
    if one is not None and other is not None:
        is_same = (one.kind, one.cause) == (other.kind, other.cause)
        cause = f"A: {one.cause}; B: {other.cause}"
        if is_same:
            cause = f"{one.cause}, in both engines alike: it does not explain their difference"
        kind = one.kind if one.kind == other.kind else "other"
        weaker = "low" if is_same else min(one.confidence, other.confidence, key=CONFIDENCES.index)
        return EngineAnswer("both", kind, cause, weaker, (f"A: {one.evidence}", f"B: {other.evidence}"))
    sides: tuple[tuple[Literal["A", "B"], Suspect | None, str], ...] = (
        ("A", one, facts[1]),
        ("B", other, facts[0]),
    )
    for name, found, beside in sides:
        if found is not None:
            evidence = (f"{name}: {found.evidence}", beside)
            return EngineAnswer(name, found.kind, found.cause, found.confidence, evidence)
    confidence = by_tokens(min(left.num_tokens, right.num_tokens))
    by_seed = [side.redrawn is not None and side.redrawn < DRAWN_AGAIN for side in (left, right)]
    if left.redrawn is not None and right.redrawn is not None and any(by_seed):
        side: Literal["A", "B", "both"] = "both" if all(by_seed) else "A" if by_seed[0] else "B"
        cause = (
            "the tokens are not those that the recorded seed draws: another seed, or other names of the rows"
        )
        return EngineAnswer(side, "seed", cause, confidence, facts)
    cause = "neither engine is at fault as far as is seen: the samples differ by seed, order or rounding"
    return EngineAnswer(None, "none", cause, confidence, facts)


def compare_prompts(left: Record, right: Record, step: int) -> EngineAnswer | None:
    """Answer if rows of the same name have prompts of other tokens."""
    prompts = [prompts_by_name(record, step) for record in (left, right)]
    shared = prompts[0].keys() & prompts[1].keys()
    other = [name for name in sorted(shared) if prompts[0][name] != prompts[1][name]]
    if not other:
        return None
    evidence = [
        f"{len(other)} of {len(shared)} prompts have other tokens, the first is that of prompt {other[0][0]}"
    ]
    changed = []
    for side, record in (("A", left), ("B", right)):
        tokenizer = (record.header.tokenizer or {"files": {}})["files"]
        model = record.header.model["files"]
        files = [name for name in tokenizer if name in model and tokenizer[name] != model[name]]
        if files:
            changed.append(side)
            evidence.append(f"{side}: {', '.join(files)} of the tokenizer are not those of the model")
    one, theirs = ((record.header.tokenizer or {"files": {}})["files"] for record in (left, right))
    named = [name for name in sorted(one.keys() | theirs.keys()) if one.get(name) != theirs.get(name)]
    files = [name for name in named if any(part in name for part in ("token", "template", "vocab"))]
    if not files:
        cause = (
            "the prompts have other tokens though the tokenizers' files are equal: other data, or other code"
        )
        return EngineAnswer(None, "tokenizer", cause, "medium", tuple(evidence))
    what = "chat template" if all("template" in name for name in files) else "tokenizer"
    evidence.append(f"{', '.join(files)} differ between A and B")
    at_fault: Literal["A", "B"] | None = ("A" if "A" in changed else "B") if len(changed) == 1 else None
    return EngineAnswer(
        at_fault, "tokenizer", f"another {what}", "high" if at_fault else "medium", tuple(evidence)
    )


def prompts_by_name(record: Record, step: int) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the tokens before the first sampled one of each row, by prompt and sample."""
    found = {}
    recorded = record.step(step)
    for rank in range(recorded.manifest.num_ranks):
        batch = recorded.batch(rank, ("cu_seqlens", "input_ids", "loss_mask", "prompt_id", "sample_id"))
        names = zip(batch["prompt_id"].tolist(), batch["sample_id"].tolist(), strict=True)
        lengths = prompt_lengths(recorded, rank, batch).values
        for name, begin, length in zip(names, batch["cu_seqlens"], lengths, strict=False):
            found[name] = tuple(batch["input_ids"][begin : begin + length].tolist())
    return found
