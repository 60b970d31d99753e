"""Check sampled tokens against a model: score, rescore with live engines, diagnose, probe.

Scoring runs in chunks: logprobs of all tokens, details of a sample and of the worst tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from consistency.alternatives.images import prepare_images
from consistency.alternatives.probes import (
    ProbeInputs,
    noise_of_engine,
    noise_of_tokens,
    probe_dtype,
    run_probes,
)
from consistency.case import DTYPES, Request, Setting, explain
from consistency.causes import Finding
from consistency.diagnose import Diagnosis, diagnose, with_derived
from consistency.engines import Top
from consistency.errors import EngineError, OtherModel
from consistency.measure import added_tokens, worst_tokens
from consistency.rescoring import NOISE_FACTOR, Rescoring, TrainerCheck, compare_trainer
from consistency.score import Progress, Scorer, Scores, load_scorer, score
from consistency.source import Sampled, concatenate, setting_of
from consistency.tokens import Floats, Sequences
from consistency.transforms import Replays, replay, select_rows, spread_rows

TOP_K = 5
# Tokens of a chunk that are scored in detail (entropy, rank, top tokens), besides the worst ones.
DETAILED_TOKENS = 20_000
NUM_WORST = 30

# Causes that a wrong --model shows as well, and the most that is said of them where nothing shows
# that it has the weights of the step.
OF_MODEL = ("R16", "R24", "R25", "R26", "R27", "R32", "R33", "R34", "R49", "R52", "R54", "R65")
DOUBTED = 0.75
DOUBT = "the model given is not that of the step, which explains this just as well and nothing here rules out"

Rescorer = Callable[[Scorer, Sequences, float], Rescoring]  # (scorer, rows, temperature)


@dataclass(frozen=True)
class Checked:
    """A diagnosis with its inputs. `notes`: what was assumed, left out, or could not be queried."""

    diagnosis: Diagnosis
    sequences: Sequences
    scores: Scores
    setting: Setting
    dtype: str
    rescoring: Rescoring | None
    tops: tuple[Top, ...] | None
    trainer_check: TrainerCheck | None
    notes: tuple[str, ...] = ()


def check(
    sampled: Sampled,
    request: Request,
    progress: Progress = lambda num_tokens: None,
    rescorer: Rescorer | None = None,
) -> Checked:
    """Compare an engine's logprobs with a model's.

    `progress` is called with the number of tokens that were scored since the last call. `rescorer`
    makes the engines that sampled score some rows again, None without a live engine; a note of the
    result reports when they cannot.

    Raises:
        ModelError: a checkpoint cannot be read.
        ConsistencyError: there is nothing to compare, or ids are beyond the model's vocabulary.
    """
    sampling = sampled.sampling
    temperature = sampling.temperature if request.temperature is None else request.temperature
    if sampling.greedy:
        temperature = 1.0  # SGLang reports greedy tokens at temperature 1
    dtype = request.dtype or sampling.trainer_dtype
    scorer = load_scorer(request.model, DTYPES[dtype], request.device)
    for chunk in sampled.chunks.values():
        refuse_other_vocabulary(chunk, scorer)
    sampled = prepare_images(scorer, sampled)
    how: Any = {"temperature": temperature, "top_k": TOP_K, "progress": progress}
    chunks = [
        score(scorer, chunk, detailed_rows=spread_rows(chunk, DETAILED_TOKENS), **how)
        for chunk in sampled.chunks.values()
    ]
    columns = vars(chunks[0])
    scores = Scores(**{name: np.concatenate([getattr(c, name) for c in chunks]) for name in columns})
    sequences = concatenate(list(sampled.chunks.values()))
    setting = setting_of(sampling, scorer.model.config, temperature, dtype, sampled.version)
    setting = replace(setting, added_token_ids=frozenset(added_tokens(request.model)))
    published = setting.noise
    if rescorer is None:
        engine = sequences.engine_logprobs[sequences.scored]
        setting = replace(setting, noise=noise_of_tokens(setting.noise, engine, scores.logprob))
    replays = with_derived(replay(scorer, sequences, temperature, setting.eos_token_id), sequences)
    rows = select_rows(sequences, replays.rows)
    inputs = ProbeInputs(scorer, rows, request, setting, dtype, replays.base)
    rescoring: Rescoring | None = None
    notes = sampled.notes
    if rescorer is not None:
        try:
            rescoring = rescorer(scorer, rows, temperature)
        except EngineError as error:  # many engines do not score prompts
            notes = (*notes, f"the engine could not be queried again: {error}")
    if rescoring is not None:
        setting = replace(setting, noise=noise_of_engine(setting.noise, rescoring))
    engine, trainer_check = sequences.engine_logprobs[sequences.scored], None
    if sampled.trainer is not None:
        trainer_check = compare_trainer(engine, sampled.trainer, scores.logprob)
        refuse_other_model(trainer_check, replays, setting, request.model)
        if trainer_check is not None and trainer_check.is_at_fault(setting.noise.mean_abs):
            how, rounding = explain_trainer(scorer, sequences, sampled.trainer, setting), 0.0
            if not how and trainer_check.trainer_model <= NOISE_FACTOR * published.mean_abs:
                other = probe_dtype(inputs)[0]
                rounding = float(np.abs(other.logprobs - replays.base).mean())
            trainer_check = replace(trainer_check, explanation=how, rounding=rounding)
    diagnose_with = partial(
        diagnose,
        sequences,
        scores,
        replays=replays,
        rescoring=rescoring,
        trainer_check=trainer_check,
        contradictions=sampled.contradictions,
    )
    found, setting = run_probes(diagnose_with, replace(inputs, setting=setting), replays)
    own = setting.noise.mean_abs if trainer_check is None else trainer_check.trainer_model
    if not request.is_shown and (trainer_check is None or own > NOISE_FACTOR * setting.noise.mean_abs):
        found = replace(found, causes=tuple(map(with_doubt, found.causes)))
    detail_worst(scorer, sequences, scores, found, temperature)
    return Checked(found, sequences, scores, setting, dtype, rescoring, sampled.tops, trainer_check, notes)


def refuse_other_model(
    trainer_check: TrainerCheck | None, replays: Replays, setting: Setting, model: str
) -> None:
    """Raise OtherModel where the model is far from trainer and engine, and no transform is why."""
    level = setting.noise.mean_abs
    if trainer_check is not None and trainer_check.is_of_other_model(level) and not explain(replays, level):
        raise OtherModel(
            f"{model} is not the model of this step: the trainer's own log-probs agree with the engine's (mean "
            f"|difference| {trainer_check.engine_trainer:.2g}) and not with this model's ({trainer_check.trainer_model:.2g}); "
            "give the checkpoint that the step starts from, with its config"
        )


def with_doubt(cause: Finding) -> Finding:
    """Say of a cause that other weights or another config would show that the model may have them."""
    if not cause.fault or cause.id not in OF_MODEL:
        return cause
    sure = min(cause.confidence, DOUBTED)
    return replace(cause, confidence=sure, refute=f"{DOUBT}; {cause.refute}")


def explain_trainer(scorer: Scorer, sequences: Sequences, trainer: Floats, setting: Setting) -> str:
    """Replay the hypotheses on the trainer's recorded logprobs; "" if none explains them."""
    column = sequences.engine_logprobs.copy()
    column[sequences.scored] = trainer
    own = replace(sequences, engine_logprobs=column)
    replays = with_derived(replay(scorer, own, setting.temperature, setting.eos_token_id), own)
    found = explain(replays, setting.noise.mean_abs)
    return "" if found is None else f"{found.prediction.name} {found.prediction.parameter:g}"


def refuse_other_vocabulary(sequences: Sequences, scorer: Scorer) -> None:
    """Raise OtherModel when an id is beyond the model's vocabulary."""
    largest = int(sequences.input_ids.max(initial=0))
    if largest >= scorer.head.vocabulary_size:
        raise OtherModel(
            f"token {largest} was sampled and the model has a vocabulary of {scorer.head.vocabulary_size}: "
            "the tokenizers differ; give the model that the engine serves"
        )


def detail_worst(
    scorer: Scorer, sequences: Sequences, scores: Scores, found: Diagnosis, temperature: float
) -> None:
    row_of_place = sequences.row_of_token[sequences.scored]
    worst = found.table.index[worst_tokens(found.table, NUM_WORST)]
    rows = np.unique(row_of_place[worst[scores.rank[worst] < 0]])
    if len(rows):
        places = np.flatnonzero(np.isin(row_of_place, rows))
        detailed = score(scorer, select_rows(sequences, rows), temperature=temperature, top_k=TOP_K)
        for name, values in vars(detailed).items():
            if name != "logprob":
                getattr(scores, name)[places] = values
