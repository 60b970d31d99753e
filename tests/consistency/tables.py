"""Small comparisons with known numbers."""

import numpy as np

from consistency.tokens import Sequences, TokenTable, compare_tokens


def table_of(trainer, engine, prompt_length: int = 1, **columns) -> TokenTable:
    """Build a table of rows: a prompt of zeros, then one token per logprob of both nested lists."""
    lengths = [prompt_length + len(row) for row in engine]
    rows = [[0] * prompt_length + list(range(1, len(row) + 1)) for row in engine]
    ids = np.concatenate(rows).astype(np.int64)
    flat = np.concatenate([[0.0] * prompt_length + list(row) for row in engine])
    mask = np.concatenate([[False] * prompt_length + [True] * len(row) for row in engine])
    sequences = Sequences(ids, np.concatenate([[0], np.cumsum(lengths)]), mask, flat, **columns)
    return compare_tokens(sequences, np.concatenate([np.asarray(row, float) for row in trainer]))
