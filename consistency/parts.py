"""Score a check in chunks: logprobs of all tokens, details of a sample and of the worst tokens.

Finished chunks are kept on disk if the request names a folder.
"""

import json
from collections.abc import Sequence

import numpy as np

from consistency.diagnose import Diagnosis
from consistency.measure import worst_tokens
from consistency.replay import select_rows, spread_rows
from consistency.request import Request
from consistency.score import Progress, Scorer, Scores, ScoringKey, load_scores, save_scores, score
from consistency.tokens import Sequences
from recorder.checksum_json import checksum
from recorder.environment import folder_identity

TOP_K = 5
# Tokens of a chunk that are scored in detail (entropy, rank, top tokens), besides the worst ones.
DETAILED_TOKENS = 20_000
NUM_WORST = 30


def score_chunk(
    scorer: Scorer,
    sequences: Sequences,
    request: Request,
    temperature: float,
    dtype: str,
    name: str,
    progress: Progress,
) -> Scores:
    """Score one chunk, or load its scores if an earlier attempt finished it."""

    def compute() -> Scores:
        rows = spread_rows(sequences, DETAILED_TOKENS)
        return score(
            scorer, sequences, temperature=temperature, top_k=TOP_K, detailed_rows=rows, progress=progress
        )

    if request.scores_folder is None:
        return compute()
    file = request.scores_folder / f"{name}.npz"
    key = ScoringKey(
        model=checksum(json.dumps(folder_identity(request.model), sort_keys=True).encode()),
        dtype=dtype,
        temperature=temperature,
        top_k=TOP_K,
        tokens=checksum(
            np.concatenate([sequences.input_ids, sequences.cu_seqlens, sequences.sampled]).tobytes()
        ),
    )
    if not file.exists():
        save_scores(file, key, compute())
    return load_scores(file, key)


def detail_worst(
    scorer: Scorer, sequences: Sequences, scores: Scores, found: Diagnosis, temperature: float
) -> None:
    """Compute the details of the rows of the worst tokens and write them into `scores`."""
    row_of_place = sequences.row_of_token[sequences.scored]
    worst = found.table.index[worst_tokens(found.table, NUM_WORST)]
    rows = np.unique(row_of_place[worst[scores.rank[worst] < 0]])
    if len(rows):
        places = np.flatnonzero(np.isin(row_of_place, rows))
        detailed = score(scorer, select_rows(sequences, rows), temperature=temperature, top_k=TOP_K)
        for name, values in vars(detailed).items():
            if name != "logprob":
                getattr(scores, name)[places] = values


def join_scores(chunks: Sequence[Scores]) -> Scores:
    """Concatenate the scores of several chunks."""
    return Scores(
        **{name: np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in vars(chunks[0])}
    )
