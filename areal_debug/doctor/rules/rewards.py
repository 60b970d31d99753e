"""What the reward is made of: terms for form that crowd out the task, dead terms, filters."""

import re

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.onset import onset
from areal_debug.doctor.read import Run
from areal_debug.doctor.rules.learning import ENOUGH_STEPS, FEWEST_EVALUATIONS, is_learning, validations
from areal_debug.doctor.rules.terms import weighted_terms, weights
from areal_debug.doctor.series import Series, binned

# `rewards/NAME/mean` of TRL, and spellings that users choose
TERM = re.compile(r"^(?:rewards|reward_components?|reward(?=/[^/]+/mean$))/(?P<name>[^/]+)(?:/mean)?$")
NOT_A_TERM = {"mean", "std", "max", "min", "chosen", "rejected", "margins", "accuracies", "total"}
OF_FORM = re.compile(r"format|tag|xml|json|style|structur|template|think|boxed|syntax|length|brevity", re.I)
DIVERGENCE = "the KL to the reference"
DOMINATES = 0.5  # share of the reward
TIMES_THE_TASK = 2.0  # gain of the terms for form over that of the task
FINE = 1e-5  # a mean reward that is printed so finely as 0 is 0: one sample that earned shows
STILL_RISING = 0.1  # share of the gain that falls into the last fifth


def terms_of(run: Run) -> dict[str, Series]:
    found = {}
    for name, series in run.by_name.items():
        match = TERM.match(name)
        if match and match["name"] not in NOT_A_TERM and len(series.finite.values) >= ENOUGH_STEPS:
            found[match["name"]] = series.finite
    return found


def form_dominates(run: Run) -> Alarm | None:
    """D31: the reward rises by terms for form (format, tags, length) and not by the task."""
    terms, reward = terms_of(run), run.finite("reward")
    of_form = [name for name in terms if OF_FORM.search(name)]
    if not of_form or len(of_form) == len(terms):
        return None
    if any(not np.array_equal(series.steps, reward.steps) for series in terms.values()):
        return None
    first = int(reward.steps[0])
    grown = onset(weighted({name: terms[name] for name in of_form}), "up")
    gains = (gains_since(begins, terms, of_form, reward) for begins in dict.fromkeys((grown, first)))
    found = next((gain for gain in gains if gain is not None), None)
    if found is None:
        return None
    begins, gain, task_gain, share, largest = found
    return alarm(
        "D31",
        terms[largest],
        found=(
            f"since step {begins} {', '.join(of_form)} gained {gain:.3g}, and the other terms {task_gain:+.3g}; "
            f"{100 * share:.0f} % of the reward at the end is for form"
        ),
        title="format" if "format" in largest.lower() else "form",
        since=begins,
    )


def gains_since(
    begins: int, terms: dict[str, Series], of_form: list[str], reward: Series
) -> tuple[int, float, float, float, str] | None:
    """Return how much form and task gained since a step, if form outweighs the task.

    None if it does not, or has not settled. The values: the step, both gains, the share of form in
    the reward at the end, and the largest of its terms.
    """
    later = {name: series.since(begins) for name, series in terms.items()}
    if len(later[of_form[0]].values) < ENOUGH_STEPS:
        return None
    weights = weights_of(later, reward.since(begins))
    form = weighted({name: later[name] for name in of_form}, weights)
    task = weighted({name: series for name, series in later.items() if name not in of_form}, weights)
    gain, task_gain = form.last - form.first, task.last - task.first
    share = form.last / max(form.last + task.last, 1e-12)
    fifth = form.values[-max(5, len(form.values) // 5) :]
    middle = len(fifth) // 2
    recent = float(np.median(fifth[middle:]) - np.median(fifth[:middle]))
    is_settled = recent < max(STILL_RISING * gain, 3 * form.noise / np.sqrt(max(1, middle)))
    outweighs = gain > 3 * form.noise and gain > TIMES_THE_TASK * max(0.0, task_gain)
    # weights of terms that rise together cannot be fitted: what they earn must say the same
    earned, earned_by_task = (
        sum(series.last - series.first for name, series in later.items() if (name in of_form) is is_form)
        for is_form in (True, False)
    )
    outweighs = outweighs and earned > TIMES_THE_TASK * earned_by_task
    if share < DOMINATES or not outweighs or not is_settled:
        return None
    largest = max(of_form, key=lambda name: weights[name] * terms[name].last)
    return begins, gain, task_gain, share, largest


def weights_of(terms: dict[str, Series], reward: Series) -> dict[str, float]:
    """Fit the weights with which the terms add up to the reward; 1 each if a weight is negative."""
    columns = np.stack([binned(series)[1] for series in terms.values()], axis=1)
    fitted = np.linalg.lstsq(columns, binned(reward)[1], rcond=None)[0]
    if (fitted < 0).any():
        fitted = np.ones(len(terms))
    return dict(zip(terms, fitted.tolist(), strict=True))


def weighted(terms: dict[str, Series], weights: dict[str, float] | None = None) -> Series:
    """Return the weighted sum of terms; without weights, their sum."""
    steps = next(iter(terms.values())).steps
    total = np.zeros(len(steps))
    for name, series in terms.items():
        total += series.values * (1.0 if weights is None else weights[name])
    return Series(" + ".join(terms), steps, total)


def term_is_dead(run: Run) -> Alarm | None:
    """D32: a term of the reward or loss, the KL, or one of several validation sets is always 0."""
    rewards = {name: one for name, one in terms_of(run).items() if "penal" not in name.lower()}  # 0: none due
    logged = rewards | weighted_terms(run)
    divergence = run.finite("reference_kl")
    moves = "grad_norm" not in run.series or run.finite("grad_norm").last > 0
    weight = weights(run).get("KL", ("", 0.0 if is_learning(run) else 1.0))[1]  # 0 is logged without one
    if moves and weight and len(divergence.values) >= ENOUGH_STEPS:
        logged[DIVERGENCE] = divergence
    sets = [series.finite for series in validations(run) if len(series.finite.values) >= FEWEST_EVALUATIONS]
    if any(series.values.any() for series in sets):  # none is solved where the model solves nothing
        logged |= {f"the validation set {series.name}": series for series in sets}
    constant = {
        name: series
        for name, series in logged.items()
        if np.ptp(series.values) == 0 and series.resolution <= (FINE if name in rewards else 0)
    }
    dead = {name: series for name, series in constant.items() if series.values[0] == 0}
    # a term that is always a whole number may be earned always
    never = dead or {
        name: one for name, one in constant.items() if name in rewards and one.values[0] % 1 != 0
    }
    if not never:
        return None
    series = next(iter(never.values()))
    found = f"{', '.join(never)}: {series.values[0]:g} in all {len(series.values)} steps"
    title = "unused" if [*never] == [DIVERGENCE] else "zero" if dead else "constant"
    return alarm("D32", series, found=found, title=title, since=int(series.steps[0]))


def filter_hides_the_reward(run: Run) -> Alarm | None:
    """D38: the reward of samples that were kept rises, that of all samples does not."""
    kept, generated = run.finite("reward"), run.finite("generated_reward")
    gains, stays = kept.trend, generated.trend
    if gains is None or stays is None or kept.name == generated.name:
        return None
    if not gains.rises or gains.change < 4 * kept.noise:
        return None
    if stays.rises and stays.change > 0.3 * gains.change:
        return None
    found = (
        f"{kept.name} changed by {gains.change:+.3g}, {generated.name} of all samples by {stays.change:+.3g}"
    )
    return alarm("D38", kept, found=found, since=onset(kept, "up"))


RULES = (form_dominates, term_is_dead, filter_hides_the_reward)
