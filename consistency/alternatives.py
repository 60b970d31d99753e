"""The same tokens scored otherwise: by another checkpoint, in another dtype, with BOS added to the prompt or taken from it."""

import numpy as np

from consistency.case import Alternative
from consistency.score import Scorer, score
from consistency.tokens import Sequences


def checkpoint_alternative(
    scorer: Scorer, sequences: Sequences, cause: str, name: str, temperature: float
) -> Alternative:
    """Another model's scores; `cause` is what it means if they are the engine's (R24 stale, R32 adapter, R38 dtype)."""
    return Alternative(cause, name, score(scorer, sequences, temperature=temperature, top_k=1).logprob)


def bos_alternatives(
    scorer: Scorer, sequences: Sequences, bos_token_id: int, temperature: float
) -> list[Alternative]:
    """With one BOS more; and with one less where every row begins with one."""
    found = [
        (
            "double BOS" if begins_with(sequences, bos_token_id) else "BOS that the record lacks",
            with_first(sequences, bos_token_id),
        )
    ]
    if begins_with(sequences, bos_token_id):
        found.append(("missing BOS", without_first(sequences)))
    return [
        Alternative("R15", name, score(scorer, changed, temperature=temperature, top_k=1).logprob)
        for name, changed in found
        if len(changed.scored) == len(sequences.scored)
    ]


def begins_with(sequences: Sequences, token_id: int) -> bool:
    """Whether every row begins with the token."""
    return bool((sequences.input_ids[sequences.cu_seqlens[:-1]] == token_id).all())


def with_first(sequences: Sequences, token_id: int) -> Sequences:
    """Every row with a token put before it."""
    begins = sequences.cu_seqlens[:-1]
    return Sequences(
        input_ids=np.insert(sequences.input_ids, begins, token_id),
        sampled=np.insert(sequences.sampled, begins, False),
        engine_logprobs=np.insert(sequences.engine_logprobs, begins, 0.0),
        cu_seqlens=sequences.cu_seqlens + np.arange(len(sequences.cu_seqlens)),
    )


def without_first(sequences: Sequences) -> Sequences:
    """Every row without its first token."""
    begins = sequences.cu_seqlens[:-1]
    return Sequences(
        input_ids=np.delete(sequences.input_ids, begins),
        sampled=np.delete(sequences.sampled, begins),
        engine_logprobs=np.delete(sequences.engine_logprobs, begins),
        cu_seqlens=sequences.cu_seqlens - np.arange(len(sequences.cu_seqlens)),
    )
