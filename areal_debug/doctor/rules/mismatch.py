"""Why engine and trainer disagree more and more, and batches that the policy did not generate."""

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import FEWEST_STEPS, Floats, Series

NEIGHBOURS = 9  # steps of the moving average that is taken off
MOST_UNCERTAIN = 0.5  # standard error of a share, as a share of the growth
FOREIGN_NATS = 1.0  # of mean log ratio: no update of a policy moves all its tokens so far
FOREIGN_WEIGHT = 0.5  # distance of the mean importance weight to 1
BESIDE_OTHERS = 10.0  # times the median of all steps


def explain_growth(run: Run, difference: Series) -> str:
    """Return a phrase that splits the growth of a logprob difference among its causes.

    Steps with longer completions, or more entropy, than their neighbours show how much the
    logarithm of the difference follows each: that sensitivity times the change over the run is
    the share of a cause. The remainder is due to what drifts: weights that differ, or staleness.
    A share whose standard error exceeds half of the growth is unknown.
    """
    causes = {}
    for name, title in (("length", "longer completions"), ("entropy", "entropy")):
        series = run.finite(name)
        if len(series.steps) and np.array_equal(series.steps, difference.steps):
            causes[title] = np.log(np.maximum(series.values, 1e-12)) if name == "length" else series.values
    growth = float(np.log(difference.last / max(difference.first, 1e-12)))
    if not causes or growth <= 0 or len(difference.values) < 2 * FEWEST_STEPS + NEIGHBOURS:
        return ""
    left = around_neighbours(np.log(np.maximum(difference.values, 1e-12)))
    basis = np.stack([around_neighbours(values) for values in causes.values()], axis=1)
    gram = np.linalg.pinv(basis.T @ basis)
    sensitivity = gram @ basis.T @ left
    noise = left - basis @ sensitivity
    errors = np.sqrt(np.diag(gram) * float(noise @ noise) / max(1, len(left) - len(causes)))
    width = difference.window
    shares = {}
    for i, (title, values) in enumerate(causes.items()):
        change = float(np.median(values[-width:]) - np.median(values[:width]))
        if errors[i] * abs(change) > MOST_UNCERTAIN * growth:
            return "; it cannot be split into length, entropy and weights: steps vary too little"
        shares[title] = float(sensitivity[i]) * change / growth
    shares["weights or staleness"] = 1 - sum(shares.values())
    largest_first = sorted(shares.items(), key=lambda share: -share[1])
    return "; of the growth, " + ", ".join(
        f"{100 * share:.0f} % is due to {title}" for title, share in largest_first
    )


def around_neighbours(values: Floats) -> Floats:
    """Return each value minus the mean of its neighbourhood: what changes from step to step."""
    ones = np.convolve(np.ones(len(values)), np.ones(NEIGHBOURS), "same")
    return values - np.convolve(values, np.ones(NEIGHBOURS), "same") / ones


def batches_are_foreign(run: Run) -> Alarm | None:
    """D43: in single steps all tokens are unlikely: the policy did not generate them."""
    series = run.finite("approx_kl")
    if series.is_short:
        return None
    sizes = np.abs(series.values)
    at = np.flatnonzero((sizes > FOREIGN_NATS) & (sizes > BESIDE_OTHERS * np.median(sizes)))
    weight = run.series.get("importance_weight")
    if weight is not None:  # a few tokens alone do not move its mean so far
        far = weight.steps[np.abs(weight.values - 1) > FOREIGN_WEIGHT]
        at = at[np.isin(series.steps[at], far)]
    # steps one after another are a policy that diverges
    if not len(at) or np.median(sizes) > FOREIGN_NATS / BESIDE_OTHERS or (np.diff(at) == 1).any():
        return None
    first = int(series.steps[at[0]])
    found = (
        f"in {len(at)} of {len(series.values)} steps the mean log ratio is beyond {FOREIGN_NATS:g}, "
        f"the largest {sizes.max():.3g}; its median is {np.median(sizes):.2g}"
    )
    return alarm("D43", series, found=found, evidence=series.at(at[:8]), since=first)


RULES = (batches_are_foreign,)
