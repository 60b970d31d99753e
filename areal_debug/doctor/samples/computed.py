"""S16 to S18: what engine and trainer computed of the rows: weights, advantages, reference."""

import re

import numpy as np

from areal_debug.doctor.names import choose_names
from areal_debug.doctor.read import flat
from areal_debug.doctor.rows import logged
from areal_debug.doctor.samples.evidence import FEWEST_ROWS, Finding, finding, has_support, share
from areal_debug.doctor.samples.read import Rows
from areal_debug.doctor.series import FEWEST_STEPS

LIKELY = -0.01  # a token above it is as good as certain under any weights
APART, FEWEST_APART = 0.5, 4  # share of the steps, and steps, between rows that are compared
NEARLY_ALL = 0.95
CENTRED, FEWEST_WINDOWS = 1e-3, 6  # of the spread of the advantages: what rounding leaves of a mean
LEAST_KL = 1e-3  # nats a token: two models, not two kernels
OF_REFERENCE = re.compile(r"(?i)\bref(erence)?(_|\.).*(path|load|model|dir|checkpoint)$")
OF_RATE = re.compile(r"(?i)(^|\.)(lr|learning_rate)$")
BY_NOTHING, VARIED = 1e-4, 0.01  # a deviation that divides, and the one of all rewards


def weights_stand_still(rows: Rows) -> Finding | None:
    """S16: the same first token after the same prompt has the same log-prob in steps far apart."""
    steps, at = np.unique(rows.step), np.flatnonzero(rows.lengths > 0)
    at = at[(rows.content[at] != 0) & (rows.logprobs[rows.bounds[at]] < LIKELY)]
    begins = rows.bounds[at]
    if not is_updated(rows, steps):
        return None
    own = rows.logprobs[begins] + rows.difference[begins]
    again, flagged, moved = np.zeros(len(rows), bool), np.zeros(len(rows), bool), []
    keys = np.stack([rows.content[at], rows.ids[begins].astype(np.int64)])
    number = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    values, least = set(), max(FEWEST_APART, APART * len(steps))
    for of in (np.flatnonzero(number == key) for key in np.unique(number)):
        if np.ptp(np.searchsorted(steps, rows.step[at[of]])) >= least:
            again[at[of]], flagged[at[of]] = True, np.ptp(rows.logprobs[begins[of]]) == 0
            values.add(float(rows.logprobs[begins[of[0]]]))
            moved.append(np.ptp(own[of]) > 0)
    if len(values) < FEWEST_ROWS or not has_support(rows, flagged) or share(flagged, again) < NEARLY_ALL:
        return None
    title = "engine" if np.mean(moved) > NEARLY_ALL and np.isfinite(own).all() else "weights"
    found = (
        f"{len(values)} first tokens of the same prompts come again in steps far apart, and {share(flagged, again):.0%} "
        "of their log-probs are the same to the last digit"
    )
    return finding("S16", found, rows, flagged, again, title=title)


def is_updated(rows: Rows, steps: np.ndarray) -> bool:
    """Return whether logged updates between steps are no warm-up, and of a rate and gradients above 0."""
    records = [rows.record.step(int(step)) for step in steps]
    stats = [logged(step) for step in records[:-1]]
    names = choose_names(sorted(set().union(*stats)))
    rate, norm = (
        np.array([one[names[quantity]] for one in stats if names.get(quantity) in one])
        for quantity in ("lr", "grad_norm")
    )
    configured = [value for name, value in flat(rows.record.header.config) if OF_RATE.search(name)]
    warms_up = len(rate) > 1 and (np.diff(rate) > 0).all()
    is_still = (len(norm) and not norm.any()) or not any(rate if len(rate) else configured or [1.0])
    is_trained = bool({"lr", "grad_norm", "loss", "policy_loss"} & names.keys())
    is_newer = records[0].manifest.version != records[-1].manifest.version
    return is_trained and is_newer and not (warms_up or is_still)


def advantages_of_others(rows: Rows) -> Finding | None:
    """S17: advantages that are centred over other rows, lost, or divided by a deviation of nothing."""
    known = np.isfinite(rows.advantage) & np.isfinite(rows.reward) & (rows.group >= 0)
    groups = [of for of in rows.groups(known) if len(of) > 1 and np.ptp(rows.reward[of]) > 0]
    if len(groups) < FEWEST_WINDOWS:
        return None
    among = np.isin(np.arange(len(rows)), np.concatenate(groups))
    centre = np.zeros(len(rows))
    for of in groups:
        centre[of] = (rows.reward[of].sum() - rows.reward[of]) / (len(of) - 1)
    gain = np.where(among, rows.reward - centre, 0.0)
    lost = among & (rows.advantage == 0) & (np.abs(gain) > CENTRED) & ~(rows.truncated == 1)
    paid = np.array([(rows.advantage[of] != 0).any() for of in groups])
    is_both = share(gain > 0, lost) * share(gain < 0, lost) > 0
    if has_support(rows, lost) and share(lost, among) > 0.1 and paid.mean() > NEARLY_ALL and is_both:
        found = f"{int(lost.sum())} of {int(among.sum())} rows have the advantage 0, and a reward that differs from their group"
        return finding("S17", found, rows, lost, among, title="lost")
    divisor = np.abs(gain) / np.maximum(np.abs(rows.advantage), 1e-12)
    wild = among & (divisor < BY_NOTHING) & (np.abs(gain) > CENTRED)
    if rows.reward[among].std() > VARIED and has_support(rows, wild):
        largest = float(np.abs(rows.advantage[wild]).max())
        found = f"{int(wild.sum())} rows have advantages up to {largest:.3g}: their rewards were divided by {divisor[wild].max():.1g}"
        return finding("S17", found, rows, wild, among, title="divided")
    return window_of_others(rows, among, groups)


def window_of_others(rows: Rows, among: np.ndarray, groups: list[np.ndarray]) -> Finding | None:
    """S17: advantages sum to 0 over rows in succession, and not over the answers of a prompt."""
    size, spread = len(groups[0]), float(rows.advantage[among].std())
    if any(len(of) != size for of in groups) or not spread:
        return None
    own = np.array([abs(rows.advantage[of].mean()) for of in groups]) / spread
    if np.median(own) < 20 * CENTRED:
        return None
    known = np.flatnonzero(np.isfinite(rows.advantage))
    for order in (known, known[np.lexsort((rows.group[known], rows.sample[known], rows.step[known]))]):
        steps = np.split(order, np.flatnonzero(np.diff(rows.step[order])) + 1)
        windows = [of.reshape(-1, size) for of in steps if len(of) % size == 0 and len(of) > size]
        rest = np.abs(rows.advantage[np.concatenate(windows)].mean(1)) / spread if windows else own
        if (rest < CENTRED).mean() >= NEARLY_ALL:
            break
    else:
        return None
    found = (
        f"the advantages of {size} rows in succession have the mean 0 ({len(rest)} times), those of the {size} answers "
        f"to a prompt {np.median(own):.2g} times the deviation in the median: groups are cut from rows in another order"
    )
    return finding("S17", found, rows, among, among, title="window")


def reference_is_other(rows: Rows) -> Finding | None:
    """S18: the log-probs of the reference are not those of the first policy, and no option says so."""
    first = rows.record.step(rows.record.steps[0]).manifest
    is_first = (rows.step == first.step) & np.isfinite(rows.apart)
    options = flat(rows.record.header.config)
    paths = {value for name, value in options if OF_REFERENCE.search(name) and isinstance(value, str)} - {""}
    is_begin = first.version == 1 and len(rows.record.steps) >= FEWEST_STEPS
    if not is_begin or not is_first.any() or paths - {str(rows.record.header.model["path"])}:
        return None
    kl = float(rows.apart[is_first].mean())
    flagged = is_first & (rows.apart > LEAST_KL)
    if kl < LEAST_KL or flagged.sum() < FEWEST_ROWS or share(flagged, is_first) < NEARLY_ALL / 2:
        return None
    found = f"the KL of the first step's policy to its reference is {kl:.3g} nats a token before any update, and not 0"
    return finding("S18", found, rows, flagged, is_first)
