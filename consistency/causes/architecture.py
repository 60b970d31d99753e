"""The two implementations disagree on the model itself: caps, padding, positions, windows."""

import numpy as np

from consistency.case import Case, Finding
from consistency.causes.definition import confidence, explained, replayed
from consistency.shape import means_by, onset, trend

MUCH = 3.0
SOON = 12  # positions after the window's end within which every sequence must have gone wrong


def soft_cap(case: Case) -> Finding | None:
    """R50: the cap on final logits is on one side only, or another one."""
    found = explained(case, "R50")
    if found is None:
        return None
    return Finding(
        "R50",
        "soft cap of final logits differs",
        confidence(found),
        f"{replayed(found)}; the order of tokens is untouched",
        "the likeliest token must be the same on both sides",
        "the same final_logit_softcapping in both configs (kernels that fuse the loss tend to drop it)",
    )


def padding_rows(case: Case) -> Finding | None:
    """R53: rows that pad the vocabulary take part of the probability."""
    found = explained(case, "R53")
    if found is None:
        return None
    return Finding(
        "R53",
        "vocabulary padding takes probability",
        confidence(found),
        f"about {found.prediction.parameter:.0f} rows of logit 0 beyond the vocabulary explain it; {replayed(found)}",
        "the engine's probabilities of all real tokens must sum to 1",
        "slice logits to vocab_size before the softmax",
    )


def window_differs(case: Case) -> Finding | None:
    """R52: clean up to one absolute position, the same in every sequence: the attention window."""
    if not case.unexplained:
        return None
    place = onset(case.table.position, case.table.difference, case.level)
    if place is None:
        return None
    size, after = (
        np.abs(case.table.difference),
        (case.table.position >= place) & (case.table.position < place + SOON),
    )
    _, means, count = means_by(case.table.sequence[after], size[after])
    if (means[count >= SOON // 2] > MUCH * case.level / 2).mean() < 0.7:
        return None  # each sequence breaks at a place of its own
    return Finding(
        "R52",
        "attention window differs",
        0.8,
        f"all sequences are clean up to about position {place}, then mean |D| is {size[case.table.position >= place].mean():.2g}",
        "sequences shorter than that must agree",
        f"compare sliding_window and layer_types in both configs (here about {place}; off by one is common)",
    )


def positions_differ(case: Case) -> Finding | None:
    """R49: |D| rises with position from the start: rotary scaling, base or attention factor."""
    if not case.unexplained:
        return None
    shape = trend(case.table.position, np.minimum(np.abs(case.table.difference), 5.0))
    if shape is None or shape.line < 0.6 or shape.line < shape.step - 0.05 or shape.last < 1.5 * shape.first:
        return None
    return Finding(
        "R49",
        "positions are encoded differently",
        0.7,
        f"|D| rises with position from {shape.first:.2g} to {shape.last:.2g}: a line explains {shape.line:.0%}, a step {shape.step:.0%}",
        "short prompts with short answers must agree far better",
        "compare rope_theta, rope_scaling (factor, attention_factor) and max_position_embeddings in both configs; with a float8 KV cache, "
        "switch that off first (R43 rises too)",
    )


def detail_differs(case: Case) -> Finding | None:
    """R54: one side computes a detail of the model as another family does."""
    found = explained(case, "R54")
    if found is None:
        return None
    return Finding(
        "R54",
        f"the engine computes another model: {found.prediction.name}",
        confidence(found),
        f"the model with {found.prediction.name} explains the engine's logprobs: {replayed(found)}",
        "dump the first layer's input and output on both sides: they must be identical up to the norm",
        "compare architectures and rms_norm_eps in both configs; serve the class that the checkpoint was trained with",
    )


CAUSES = (soft_cap, padding_rows, window_differs, positions_differ, detail_differs)
