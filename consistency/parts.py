"""Scores of the parts of a check: logprobs of all tokens, kept on disk if wanted, and details of a sample and of the worst tokens."""

import json
from collections.abc import Sequence

import numpy as np

from consistency.diagnose import Diagnosis
from consistency.measure import worst_tokens
from consistency.replay import select_rows, spread_rows
from consistency.request import Request
from consistency.score import Progress, Question, Scorer, Scores, load_scores, save_scores, score
from consistency.tokens import Sequences
from recorder.environment import folder_identity
from recorder.sealed import checksum

TOP_K = 5
# Entropy, rank and the likeliest tokens are asked of so many tokens a part, and of the worst ones.
TOKENS_IN_DETAIL = 20_000
MOST_WORST = 30


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
