"""One check against a model: score (resuming where it was interrupted), score otherwise, ask live engines again, diagnose."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from consistency.alternatives import bos_alternatives, checkpoint_alternative, quantized_alternatives
from consistency.case import Alternative, Noise, Setting
from consistency.classes import KINDS, kinds_of
from consistency.diagnose import Diagnosis, diagnose, is_accusation
from consistency.engine.reply import Top
from consistency.errors import EngineError, OtherTokenizer
from consistency.estimators import k3
from consistency.groups import Group, group_by
from consistency.measure import worst_tokens
from consistency.replay import Replays, replay, select_rows, spread_rows
from consistency.rescoring import Rescoring
from consistency.score import Progress, Question, Scorer, Scores, load_scorer, load_scores, save_scores, score
from consistency.source import Sampled, concatenate, setting_of
from consistency.third import ThirdOpinion, third_opinion, trainer_logprobs
from consistency.tokens import Sequences
from recorder.environment import folder_identity
from recorder.sealed import checksum

TOP_K = 5
# Entropy, rank and the likeliest tokens are asked of so many tokens a part, and of the worst ones.
TOKENS_IN_DETAIL = 20_000
MOST_WORST = 30
SURE = 0.85
# Two kernels that both round differ by more than one that rounds from one that does not: sqrt(2), and some.
NOISE_MARGIN = 1.6
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
AskAgain = Callable[[Scorer, Sequences, float], Rescoring]


@dataclass(frozen=True)
class Request:
    """What to compare with. Checkpoints are folders in Hugging Face format; None where not given.

    `model` holds the weights that should have sampled; `scores_folder` keeps finished scores for the next attempt; `trainer` asks the
    trainer's own packed path too, where the record does not hold what it said.
    """

    model: str
    dtype: str | None = None
    device: str = "cpu"
    temperature: float | None = None
    previous: str | None = None
    base: str | None = None
    scores_folder: Path | None = None
    trainer: bool = False


@dataclass(frozen=True)
class Checked:
    """A diagnosis, with what it was made from. `notes` say what could not be asked."""

    diagnosis: Diagnosis
    sequences: Sequences
    scores: Scores
    setting: Setting
    dtype: str
    rescoring: Rescoring | None
    tops: tuple[Top, ...] | None
    third: ThirdOpinion | None
    notes: tuple[str, ...] = ()


def check(
    sampled: Sampled,
    request: Request,
    progress: Progress = lambda num_tokens: None,
    ask_again: AskAgain | None = None,
) -> Checked:
    """Compare an engine's logprobs with a model's.

    Args:
        ask_again: has the engines that sampled score some rows once more; None where they are gone. Where they cannot, a note says so.

    Raises:
        ModelError: a checkpoint cannot be read. ConsistencyError: nothing to compare.
    """
    sampling = sampled.sampling
    temperature = sampling.temperature if request.temperature is None else request.temperature
    if sampling.greedy:
        temperature = 1.0  # SGLang reports greedy tokens at temperature 1
    dtype = request.dtype or sampling.trainer_dtype
    scorer = load_scorer(request.model, DTYPES[dtype], request.device)
    for part in sampled.parts.values():
        refuse_other_vocabulary(part, scorer)
    scores = join_scores(
        [
            score_part(scorer, part, request, temperature, dtype, name, progress)
            for name, part in sampled.parts.items()
        ]
    )
    sequences = concatenate(list(sampled.parts.values()))
    setting = setting_of(sampling, scorer.model.config, temperature, dtype, sampled.version)
    replays = replay(scorer, sequences, temperature, setting.eos_token_id)
    rows = select_rows(sequences, replays.rows)
    rescoring: Rescoring | None = None
    notes: tuple[str, ...] = ()
    if ask_again is not None:
        try:
            rescoring = ask_again(scorer, rows, temperature)
        except EngineError as error:  # many engines do not score prompts; the rest can be judged all the same
            notes = (f"the engine was not asked again: {error}",)
    if rescoring is not None:
        setting = replace(setting, noise=noise_of_engine(setting.noise, rescoring))
    third = ask_trainer(sampled, sequences, scores, request, dtype, temperature)
    judge = partial(diagnose, sequences, scores, replays=replays, rescoring=rescoring, third=third)
    found = judge(setting)
    given: list[Alternative] = []
    # Each further look costs passes over the sample, and is taken only where doubt is left.
    for look in (other_dtype, other_prompts, other_checkpoints, quantised_weights):
        if settled(found):
            break
        given += look(scorer, rows, request, setting, dtype)
        if look is other_dtype:
            setting = replace(setting, noise=noise_of_model(setting.noise, given[0], replays))
        found = judge(setting, alternatives=given)
    detail_worst(scorer, sequences, scores, found, temperature)
    found = with_more_groups(found, scores, setting, request.model)
    return Checked(found, sequences, scores, setting, dtype, rescoring, sampled.tops, third, notes)


def ask_trainer(
    sampled: Sampled, sequences: Sequences, scores: Scores, request: Request, dtype: str, temperature: float
) -> ThirdOpinion | None:
    """What the trainer said according to the record, or says now if the request wants to know."""
    if sampled.trainer is not None:
        source, trainer = "the record", sampled.trainer
    elif request.trainer:
        source = "its packed path, now"
        trainer = trainer_logprobs(request.model, dtype, request.device, sequences, temperature)
    else:
        return None
    return third_opinion(source, sequences.engine_logprobs[sequences.scored], trainer, scores.logprob)


def settled(found: Diagnosis) -> bool:
    """Whether another look could hardly change the verdict."""
    return found.verdict == "healthy" or any(is_accusation(c) and c.confidence > SURE for c in found.causes)


def noise_of_model(published: Noise, other_dtype: Alternative, replays: Replays) -> Noise:
    """The published noise, or more where this model's own logprobs move more from dtype to dtype (small models' do)."""
    moves = other_dtype.logprobs - replays.base
    mean_abs, third = float(np.abs(moves).mean()), float(k3(moves).mean())
    if published.name == "float32" or NOISE_MARGIN * mean_abs <= published.mean_abs:
        return published
    return Noise(
        f"{published.name}, on this model",
        max(published.mean_abs, NOISE_MARGIN * mean_abs),
        max(published.k3, NOISE_MARGIN**2 * third),
        f"{other_dtype.name} instead moves its logprobs by {mean_abs:.2g} on average",
    )


def noise_of_engine(published: Noise, rescoring: Rescoring) -> Noise:
    """The published noise, or more where the engine differs more from itself: no comparison can be finer than that."""
    own = NOISE_MARGIN * rescoring.engine_repeat
    if not own > published.mean_abs:
        return published
    return Noise(
        f"{published.name}, on this engine",
        own,
        max(published.k3, own**2),
        f"scoring the same tokens twice, the engine differs from itself by {rescoring.engine_repeat:.2g} on average",
    )


def score_part(
    scorer: Scorer,
    sequences: Sequences,
    request: Request,
    temperature: float,
    dtype: str,
    name: str,
    progress: Progress,
) -> Scores:
    """Scores of one part, from disk where an earlier attempt finished them."""

    def scored() -> Scores:
        rows = spread_rows(sequences, TOKENS_IN_DETAIL)
        return score(
            scorer, sequences, temperature=temperature, top_k=TOP_K, detailed_rows=rows, progress=progress
        )

    if request.scores_folder is None:
        return scored()
    file = request.scores_folder / f"{name}.npz"
    question = Question(
        model=checksum(json.dumps(folder_identity(request.model), sort_keys=True).encode()),
        dtype=dtype,
        temperature=temperature,
        top_k=TOP_K,
        tokens=checksum(
            np.concatenate([sequences.input_ids, sequences.cu_seqlens, sequences.sampled]).tobytes()
        ),
    )
    if not file.exists():
        save_scores(file, question, scored())
    return load_scores(file, question)


def with_more_groups(found: Diagnosis, scores: Scores, setting: Setting, model: str) -> Diagnosis:
    """The same numbers by decile of the model's entropy, where it was asked, and by kind of token."""
    table, difference = found.table, found.table.difference
    more: dict[str, tuple[Group, ...]] = {}
    entropy = scores.entropy[table.index]
    asked = np.isfinite(entropy)
    if asked.any():
        edges = np.quantile(entropy[asked], np.arange(0.1, 1.0, 0.1))
        more["entropy_decile"] = group_by(np.searchsorted(edges, entropy[asked]), difference[asked])
    kinds = kinds_of(table.token_id, model, setting.eos_token_id, setting.bos_token_id)
    if kinds is not None:
        groups = group_by(kinds, difference)
        more["kind"] = tuple(replace(group, key=KINDS[int(group.key)]) for group in groups)
    return replace(found, measurement=replace(found.measurement, by=found.measurement.by | more))


def refuse_other_vocabulary(sequences: Sequences, scorer: Scorer) -> None:
    """Raises OtherTokenizer when an id is beyond the model's vocabulary."""
    largest = int(sequences.input_ids.max(initial=0))
    if largest >= scorer.head.vocabulary_size:
        raise OtherTokenizer(
            f"token {largest} was sampled and the model has a vocabulary of {scorer.head.vocabulary_size}: "
            "the tokenizers differ; give the model that the engine serves"
        )


def detail_worst(
    scorer: Scorer, sequences: Sequences, scores: Scores, found: Diagnosis, temperature: float
) -> None:
    """Ask in detail about the rows of the worst tokens, where it was not done, and write it into `scores`."""
    row_of_place = sequences.row_of_token[sequences.scored]
    worst = found.table.index[worst_tokens(found.table, MOST_WORST)]
    rows = np.unique(row_of_place[worst[scores.rank[worst] < 0]])
    if len(rows):
        places = np.flatnonzero(np.isin(row_of_place, rows))
        detailed = score(scorer, select_rows(sequences, rows), temperature=temperature, top_k=TOP_K)
        for name, values in vars(detailed).items():
            if name != "logprob":
                getattr(scores, name)[places] = values


def join_scores(parts: Sequence[Scores]) -> Scores:
    """Scores of several parts, one after another."""
    return Scores(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])}
    )


def other_dtype(
    scorer: Scorer, rows: Sequences, request: Request, setting: Setting, dtype: str
) -> list[Alternative]:
    """The same model in the other dtype."""
    other = "bfloat16" if dtype == "float32" else "float32"
    model = load_scorer(request.model, DTYPES[other], request.device)
    return [checkpoint_alternative(model, rows, "R38", f"scoring in {other}", setting.temperature)]


def other_prompts(
    scorer: Scorer, rows: Sequences, request: Request, setting: Setting, dtype: str
) -> list[Alternative]:
    """With and without BOS."""
    if setting.bos_token_id is None:
        return []
    return bos_alternatives(scorer, rows, setting.bos_token_id, setting.temperature)


def quantised_weights(
    scorer: Scorer, rows: Sequences, request: Request, setting: Setting, dtype: str
) -> list[Alternative]:
    """As weight-only quantisation would leave the model."""
    return quantized_alternatives(scorer, rows, setting.temperature)


def other_checkpoints(
    scorer: Scorer, rows: Sequences, request: Request, setting: Setting, dtype: str
) -> list[Alternative]:
    """By the checkpoints that were given."""
    wanted = (("R24", "the previous checkpoint", request.previous), ("R32", "the base model", request.base))
    return [
        checkpoint_alternative(
            load_scorer(path, DTYPES[dtype], request.device), rows, cause, name, setting.temperature
        )
        for cause, name, path in wanted
        if path is not None
    ]
