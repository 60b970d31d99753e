"""One check against a model: score (resuming where it was interrupted), score otherwise, ask live engines again, diagnose."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from consistency.case import Setting
from consistency.classes import KINDS, added_tokens, kinds_of
from consistency.diagnose import Diagnosis, diagnose
from consistency.engine.reply import Top
from consistency.errors import EngineError, OtherTokenizer
from consistency.groups import Group, group_by
from consistency.looks import look_further
from consistency.noise import noise_of_engine
from consistency.parts import detail_worst, join_scores, score_part
from consistency.replay import replay, select_rows
from consistency.request import DTYPES, Request
from consistency.rescoring import Rescoring
from consistency.score import Progress, Scorer, Scores, load_scorer
from consistency.source import Sampled, concatenate, setting_of
from consistency.third import ThirdOpinion, third_opinion, trainer_logprobs
from consistency.tokens import Sequences

AskAgain = Callable[[Scorer, Sequences, float], Rescoring]


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
    setting = replace(setting, added_token_ids=frozenset(added_tokens(request.model)))
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
    found, setting = look_further(judge, setting, scorer, rows, replays, request, dtype)
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


def refuse_other_vocabulary(sequences: Sequences, scorer: Scorer) -> None:
    """Raises OtherTokenizer when an id is beyond the model's vocabulary."""
    largest = int(sequences.input_ids.max(initial=0))
    if largest >= scorer.head.vocabulary_size:
        raise OtherTokenizer(
            f"token {largest} was sampled and the model has a vocabulary of {scorer.head.vocabulary_size}: "
            "the tokenizers differ; give the model that the engine serves"
        )


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
