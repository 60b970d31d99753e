"""How much difference is noise: the published level of a precision, or more where model or engine show more of their own."""

import numpy as np

from consistency.case import Alternative, Noise
from consistency.estimators import k3
from consistency.replay import Replays
from consistency.rescoring import Rescoring

# Two kernels that both round differ by more than one that rounds from one that does not: sqrt(2), and some.
NOISE_MARGIN = 1.6


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
