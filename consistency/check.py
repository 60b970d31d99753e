"""One check of a record against a model: read, score (resuming where it was interrupted), score otherwise, diagnose."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from consistency.alternatives import bos_alternatives, checkpoint_alternative
from consistency.case import Alternative, Setting
from consistency.diagnose import Diagnosis, diagnose
from consistency.score import Progress, Question, Scorer, Scores, load_scorer, load_scores, save_scores, score
from consistency.source import concatenate, parse_sampling, read_step, setting_of
from consistency.tokens import Sequences
from recorder import Record
from recorder.environment import folder_identity
from recorder.sealed import checksum

TOP_K = 5
SURE = 0.85
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
    found = diagnose(sequences, scores, setting, scorer)
    if found.verdict != "healthy" and not any(cause.confidence > SURE for cause in found.causes):
        # a second pass over the tokens, only where the first one leaves a doubt
        found = diagnose(
            sequences, scores, setting, scorer, alternatives(scorer, sequences, request, setting, dtype)
        )
    return Checked(found, sequences, scores, setting, dtype)


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


def alternatives(
    scorer: Scorer, sequences: Sequences, request: Request, setting: Setting, dtype: str
) -> list[Alternative]:
    """Other scores of the same tokens: with and without BOS, in the other dtype, by the checkpoints that were given."""
    found: list[Alternative] = []
    if setting.bos_token_id is not None:
        found += bos_alternatives(scorer, sequences, setting.bos_token_id, setting.temperature)
    other_dtype = "bfloat16" if dtype == "float32" else "float32"
    wanted: list[tuple[str, str, str | None, str]] = [
        ("R38", f"scoring in {other_dtype}", request.model, other_dtype),
        ("R24", "the previous checkpoint", request.previous, dtype),
        ("R32", "the base model", request.base, dtype),
    ]
    for cause, name, path, kind in wanted:
        if path is not None:
            other = load_scorer(path, DTYPES[kind], request.device)
            found.append(checkpoint_alternative(other, sequences, cause, name, setting.temperature))
    return found
