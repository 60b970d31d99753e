"""One check of a record against a model: read, score (resuming where it was interrupted), score otherwise, diagnose."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from consistency.alternatives import bos_alternatives, checkpoint_alternative
from consistency.case import Alternative, Noise, Setting
from consistency.diagnose import Diagnosis, diagnose, is_accusation
from consistency.estimators import k3
from consistency.replay import Replays, replay, select_rows
from consistency.score import Progress, Question, Scorer, Scores, load_scorer, load_scores, save_scores, score
from consistency.source import concatenate, parse_sampling, read_step, setting_of
from consistency.tokens import Sequences
from recorder import Record
from recorder.environment import folder_identity
from recorder.sealed import checksum

TOP_K = 5
SURE = 0.85
# Two kernels that both round differ by more than one that rounds from one that does not: sqrt(2), and some.
NOISE_MARGIN = 1.6
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Request:
    """What to compare. Checkpoints are folders in Hugging Face format; None where not given.

    `model` holds the weights that should have sampled `steps`; `scores_folder` keeps finished scores for the next attempt.
    """

    model: str
    steps: tuple[int, ...]
    dtype: str | None = None
    device: str = "cpu"
    temperature: float | None = None
    previous: str | None = None
    base: str | None = None
    scores_folder: Path | None = None


@dataclass(frozen=True)
class Checked:
    """A diagnosis, with what it was made from."""

    diagnosis: Diagnosis
    sequences: Sequences
    scores: Scores
    setting: Setting
    dtype: str


def check_record(record: Record, request: Request, progress: Progress = lambda num_tokens: None) -> Checked:
    """Compare the engine's recorded logprobs of some steps with a model's.

    Raises:
        RecordError: a step cannot be read. ModelError: a checkpoint cannot be. ConsistencyError: nothing to compare.
    """
    sampling = parse_sampling(record)
    temperature = sampling.temperature if request.temperature is None else request.temperature
    if sampling.greedy:
        temperature = 1.0  # SGLang reports greedy tokens at temperature 1
    dtype = request.dtype or sampling.trainer_dtype
    steps = [read_step(record.step(number)) for number in request.steps]
    versions = {record.step(number).plan(0).version for number in request.steps}
    scorer = load_scorer(request.model, DTYPES[dtype], request.device)
    scores = join_scores(
        [
            score_step(scorer, part, request, temperature, dtype, number, progress)
            for number, part in zip(request.steps, steps, strict=True)
        ]
    )
    sequences = concatenate(steps)
    version = versions.pop() if len(versions) == 1 else None
    setting = setting_of(sampling, scorer.model.config, temperature, dtype, version)
    replays = replay(scorer, sequences, temperature, setting.eos_token_id)
    found = diagnose(sequences, scores, setting, replays)
    given: list[Alternative] = []
    # Each further look costs passes over the sample, and is taken only where doubt is left.
    for look in (other_dtype, other_prompts, other_checkpoints):
        if settled(found):
            break
        given += look(scorer, select_rows(sequences, replays.rows), request, setting, dtype)
        if look is other_dtype:
            setting = replace(setting, noise=noise_of_model(setting.noise, given[0], replays))
        found = diagnose(sequences, scores, setting, replays, given)
    return Checked(found, sequences, scores, setting, dtype)


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


def score_step(
    scorer: Scorer,
    sequences: Sequences,
    request: Request,
    temperature: float,
    dtype: str,
    step: int,
    progress: Progress,
) -> Scores:
    """Scores of one step, from disk where an earlier attempt finished them."""

    def scored() -> Scores:
        return score(scorer, sequences, temperature=temperature, top_k=TOP_K, progress=progress)

    if request.scores_folder is None:
        return scored()
    file = request.scores_folder / f"step-{step:06d}.npz"
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


def join_scores(parts: Sequence[Scores]) -> Scores:
    """Scores of several steps, one after another."""
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
