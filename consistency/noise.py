"""The noise floor: the published level of a precision, raised by what model or engine show."""

import numpy as np

from consistency.case import Alternative, Noise
from consistency.estimators import k3
from consistency.replay import Replays
from consistency.rescoring import Rescoring

# Two rounding kernels differ more than a rounding one from an exact one: sqrt(2), with a margin.
NOISE_MARGIN = 1.6


def noise_of_model(published: Noise, other_dtype: Alternative, replays: Replays) -> Noise:
    """Return the published noise, or more if this model's logprobs change more between dtypes.

    Those of small models do.
    """
    moves = other_dtype.logprobs - replays.base
    mean_abs, k3_mean = float(np.abs(moves).mean()), float(k3(moves).mean())
    if published.name == "float32" or NOISE_MARGIN * mean_abs <= published.mean_abs:
        return published
    return Noise(
        f"{published.name}, on this model",
        max(published.mean_abs, NOISE_MARGIN * mean_abs),
        max(published.k3, NOISE_MARGIN**2 * k3_mean),
        f"{other_dtype.name} changes its logprobs by {mean_abs:.2g} on average",
    )


def noise_of_engine(published: Noise, rescoring: Rescoring) -> Noise:
    """Return the published noise, or the engine's run-to-run variation if that is larger."""
    variation = NOISE_MARGIN * rescoring.engine_repeat
    if not variation > published.mean_abs:
        return published
    return Noise(
        f"{published.name}, on this engine",
        variation,
        max(published.k3, variation**2),
        f"two engine scorings of the same tokens differ by {rescoring.engine_repeat:.2g} on average",
    )
