"""The two implementations disagree on the architecture: caps, padding, positions, windows."""

import numpy as np

from consistency.case import BAD_RATIO, Case, Finding
from consistency.causes.definition import confidence, explained, replay_evidence
from consistency.shape import means_by, onset, trend

TOKENS_AFTER_ONSET = 12  # positions after the window's end in which every sequence must be bad


def soft_cap(case: Case) -> Finding | None:
    """R50: the cap on final logits is missing on one side, or different."""
    found = explained(case, "R50")
    if found is None:
        return None
    return Finding(
        "R50",
        "soft cap of final logits differs",
        confidence(found),
        f"{replay_evidence(found)}; the order of tokens is unchanged",
        "the most likely token must be the same on both sides",
        "the same final_logit_softcapping in both configs (kernels that fuse the loss tend to drop it)",
    )


def padding_rows(case: Case) -> Finding | None:
    """R53: rows that pad the vocabulary take probability mass."""
    found = explained(case, "R53")
    if found is None:
        return None
    return Finding(
        "R53",
        "vocabulary padding takes probability",
        confidence(found),
        f"about {found.prediction.parameter:.0f} rows of logit 0 beyond the vocabulary explain it; {replay_evidence(found)}",
        "the engine's probabilities of all real tokens must sum to 1",
        "slice logits to vocab_size before the softmax",
    )


def window_differs(case: Case) -> Finding | None:
    """R52: bad from the same absolute position on in every sequence: the attention window."""
    if not case.unexplained:
        return None
    place = onset(case.table.position, case.table.difference, case.level)
    if place is None:
        return None
    size, after = (
        np.abs(case.table.difference),
        (case.table.position >= place) & (case.table.position < place + TOKENS_AFTER_ONSET),
    )
    _, means, count = means_by(case.table.sequence[after], size[after])
    if (means[count >= TOKENS_AFTER_ONSET // 2] > BAD_RATIO * case.level / 2).mean() < 0.7:
        return None  # sequences diverge at different positions
    return Finding(
        "R52",
        "attention window differs",
        0.8,
        f"all sequences are clean up to about position {place}, then mean |D| is {size[case.table.position >= place].mean():.2g}",
        "sequences shorter than that must agree",
        f"compare sliding_window and layer_types in both configs (about {place}; off by one is common)",
    )


def positions_differ(case: Case) -> Finding | None:
    """R49: other rotary embeddings, or |D| that rises with position from the start."""
    found = explained(case, "R49")
    if found is not None:
        return Finding(
            "R49",
            "positions are encoded differently",
            confidence(found),
            f"the model with {found.prediction.name} explains the engine's logprobs: {replay_evidence(found)}",
            "serve with that value corrected: the difference must fall to noise",
            "compare rope_theta, rope_scaling (factor, attention_factor) and max_position_embeddings in both configs",
        )
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
        "short prompts with short completions must agree far better",
        "compare rope_theta, rope_scaling (factor, attention_factor) and max_position_embeddings in both configs; with a float8 KV cache, "
        "switch that off first (its error grows with position as well)",
    )


def detail_differs(case: Case) -> Finding | None:
    """R54: one side computes a detail of the model as another model family does."""
    found = explained(case, "R54")
    if found is None:
        return None
    return Finding(
        "R54",
        f"the engine computes another architecture: {found.prediction.name}",
        confidence(found),
        f"the model with {found.prediction.name} explains the engine's logprobs: {replay_evidence(found)}",
        "dump the first layer's input and output on both sides: they must be identical up to the norm",
        "compare architectures and rms_norm_eps in both configs; serve the class that the checkpoint was trained with",
    )


CAUSES = (soft_cap, padding_rows, window_differs, positions_differ, detail_differs)
