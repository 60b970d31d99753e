"""Recognise causes in a comparison: one check per row of the table that no replay alone settles.

A check returns its row filled in (`causes.finding`), or None. What a replayed hypothesis explains
is one finding (`from_replay`); the other checks look at counts, shape and noise of D.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from consistency.case import BAD_RATIO, LARGEST_SURPRISE, RARE_NATS, Case, Explanation
from consistency.causes import CAUSES, Finding, finding
from consistency.checks.numerics import CHECKS_OF_NUMBERS, moves_of_dtype, only_decoded_tokens_differ
from consistency.checks.shape import MIN_RUN, breaks, explained_by_key, run_lengths, trend
from consistency.measure import NEGLIGIBLE, correlation, means_by
from consistency.tensors import EVERY, TOWER, VOCABULARY_WORDS
from consistency.tokens import Bools, Floats, Ints
from consistency.transforms import LEAST_EXPECTED, Prediction

# Thresholds, with their units and what they follow from.
T_TOLERANCE = 0.02  # of a temperature
LARGEST_CHANCE = 0.01  # that no bad row is among the fresh ones
SURE_MARGIN = 40.0  # nats over the next tensor
MOST_LEFT = 0.5  # of the difference by the engine's experts alone, where the choice is the cause
APART_RATIO, APART_ERRORS = 1.5, 5.0  # between engines of usual noise: of means, in standard errors
SMALL_BUT_APART = 0.7  # confidence in engines that differ so
OF_SEVERAL = 0.7  # confidence in transforms that act at once: others may fit nearly as well
NOT_ALL = 0.85  # confidence in what leaves more than noise: another cause may do what it does
UNRELATED = 0.5  # confidence, below R33: where nothing is alike, the token id explains much of D, too
OPEN_ZEROS = 0.6  # confidence in missing log-probs where the others are wrong as well
EVERYWHERE = 0.9  # of the rows are bad where weights differ
BEYOND_NOISE = 5.0  # times the level: more than a sound engine that rounds more than was published
DECISIVE = 3.0  # gain of rounding logits from which an engine in bfloat16 has more than its usual noise
DRAWN = {"R01": "R01.drawn", "R03": "R04", "R05": "R05", "R06": "R06.eos", "R06.tokens": "R06.drawn"}
OF_NUMBERS = ("R37", "R38", "R44")  # what rounds log-probs says nothing of how tokens were drawn
FEWEST_FOREIGN = 64  # tokens of rows with other tokens' log-probs
AS_LIKELY = 0.4  # of the nats from the model's own tokens to those drawn by chance
SHARED = 0.3  # correlation with the trainer's, at most, of log-probs of other tokens
VISION_WORDS = (".visual.", "vision_tower", "multi_modal_projector")


# What a replayed hypothesis explains.


def from_replay(case: Case) -> Finding | None:
    """Return the finding of the hypothesis that explains the reported logprobs."""
    found = case.explanation
    if found is None:
        return None
    p = found.prediction
    key, recorded = p.cause, case.setting.temperature
    if key == "R01" and abs(recorded - 1.0) > T_TOLERANCE:  # applied twice, or inverted?
        nearest = min(abs(p.parameter - recorded**2), abs(p.parameter - 1 / recorded))
        key = "R02" if nearest < T_TOLERANCE else key
    if key == "R42" and left_by_experts(case)[1] > MOST_LEFT * case.mean_abs:
        key = "R42.weights"
    if p.ids and p.ids <= case.setting.added_token_ids:
        key = "R55.bias"
    if key == "R24" and p.rows and policy_moved(case):  # as their versions say
        return None
    if p.rows and f"{key}.rows" in CAUSES:
        key += ".rows"
    value = f" {p.parameter:g}" if p.parameter else ""
    value += f" for {p.rows}" if p.rows else ""
    left = f"leaves a residual {found.gain:.1f} times smaller ({found.residual:.2g})"
    shown = f"replaying {p.name}{value} {left}"
    declared = {"R37": "bfloat16", "R38": "bfloat16", "R44": "float8"}.get(key, "no dtype")
    is_declared = declared in p.name and case.setting.noise.name.startswith(declared)
    is_small = case.mean_abs <= case.level
    rounds_logits = is_declared and is_small and found.gain < DECISIVE
    is_usual = {"R37": rounds_logits, "R38": is_declared or is_small, "R44": is_declared}
    fault = False if is_usual.get(key) else None
    is_all = found.residual <= BEYOND_NOISE * case.level
    most = OF_SEVERAL if key.endswith(".several") else 1.0 if is_all else NOT_ALL
    said = finding(key, min(confidence(found), most), is_fault=fault, replay=shown, **facts_of(case, p))
    is_told = not p.rows or p.rows in said.name or key.endswith(".rows")
    return said if is_told else replace(said, name=f"{said.name}, in {p.rows}")


def confidence(found: Explanation) -> float:
    """Map the gain, residual before over after, to 0.6 (least accepted gain) to 0.99 (from 20)."""
    return float(np.clip(0.6 + 0.39 * np.log(found.gain / 1.5) / np.log(20 / 1.5), 0.6, 0.99))


def facts_of(case: Case, p: Prediction) -> dict[str, Any]:
    """Return what the sentences about a replayed hypothesis say."""
    metrics, ranks = case.measurement.metrics, case.scores.rank
    recorded, value = case.setting.temperature, p.parameter
    names = ("the trainer's router", "the engine's experts", "the engine's experts and weights")
    split = [f"{left:.2g} with {name}" for name, left in zip(names, left_by_experts(case), strict=False)]
    is_raw, is_always = abs(value - 1.0) < T_TOLERANCE, np.isinf(value)
    return {
        "name": f"{p.name} for {p.rows}" if p.rows else p.name,
        "value": value,
        "what": "the engine reports raw logprobs (temperature 1)"
        if is_raw
        else f"the engine's logprobs are of temperature {value:.3g}",
        "temperature": recorded,
        "square": recorded**2,
        "positive": metrics["share_positive"],
        "ratio": metrics["ratio_mean"],
        "option": p.name.split()[0],
        "neutral": "1.0" if "repetition" in p.name else "0.0",
        "where": "everywhere" if is_always else f"for the first {value:.0f} tokens",
        "share": float(np.mean(ranks[ranks >= 0] == 0)),
        "paired": f"{value:.0%} of the rows fit another row's scores"
        if value
        else f"{p.name} explain the logprobs",
        "split": ", ".join(split),
        "absent": f"of {len(ranks)} tokens none is one of these, and {LEAST_EXPECTED:g} or more of each were expected",
        "mean_abs": case.mean_abs,
    }


def left_by_experts(case: Case) -> list[float]:
    """Return mean |D| of the live router, with the engine's experts, and with its weights if known."""
    assert case.replays is not None
    found = [p.logprobs for p in case.replays.predictions if p.cause == "R42"]
    return [float(np.abs(case.replays.engine - values).mean()) for values in (case.replays.base, *found)]


def hidden_transform(case: Case) -> Finding | None:
    """Return the transform that drew the tokens though their logprobs are the trainer's."""
    if case.drawn_by is None or case.unexplained:
        return None
    if case.explanation is not None and case.explanation.prediction.cause not in OF_NUMBERS:
        return None
    p, nats = case.drawn_by
    key = DRAWN.get(p.cause)
    if key is None:
        return None
    lengths = np.unique(case.table.sequence, return_counts=True)[1]
    if key == "R06.eos" and np.isinf(p.parameter) and np.ptp(lengths) > 0:  # something ended replies
        key = "R17.eos"
    rank, mass = case.scores.rank.max(), np.nanmax(case.scores.mass_before)
    drawn = (
        f"the tokens are {nats:.0f} nats likelier under {p.name} {p.parameter:.3g}, though the logprobs agree"
    )
    said = {"nats": nats, "replay": drawn, "rank": rank, "mass": mass, "surprise": case.surprise()}
    return finding(key, **said, **facts_of(case, p))


def log_units(engine: Floats, trainer: Floats) -> Finding | None:
    """R08: values above 0 are probabilities or negative log-likelihoods.

    Runs before anything is averaged.
    """
    finite = np.isfinite(engine)
    if finite.sum() < 2 or np.mean(engine[finite] > 0) < 0.5:
        return None
    values, expected = engine[finite], trainer[finite]
    as_probability = np.inf
    if (values <= 1).all() and (values > 0).all():
        as_probability = float(np.median(np.abs(np.log(values) - expected)))
    as_negative = float(np.median(np.abs(-values - expected)))
    name = "probabilities" if as_probability < as_negative else "negative log-likelihoods"
    return finding(
        "R08.sign",
        name=f"{name} instead of logprobs",
        share=np.mean(values > 0),
        left=min(as_probability, as_negative),
    )


def in_logprobs(units: Finding, engine: Floats) -> Floats:
    """Convert the engine's numbers as `log_units` found."""
    if "negative" in units.name:
        return -engine
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(engine, 0))


# Alignment.


def lengths_differ(case: Case) -> Finding | None:
    differences = case.sequences.length_differences
    if not differences:
        return None
    at_the_end = all(abs(d) == 1 for d in differences)
    name = "EOS without its logprob, or a logprob without its token"
    return finding(
        "R17",
        name=name if at_the_end else "logprobs and ids differ in number",
        count=len(differences),
        differences=sorted(set(differences))[:5],
    )


def foreign_tokens(case: Case) -> Finding | None:
    """R18, R60: spans of exact zeros: tokens that were not sampled, or log-probs that are missing.

    Sampled tokens are as likely as the model expects. Where the other tokens are wrong as well, it
    is not known after which tokens the model should have sampled these.
    """
    table = case.table
    zero = (table.engine == 0.0) & (table.trainer < -0.05)
    runs = run_lengths(zero, table.sequence)
    long = runs if len(runs) > 2 * MIN_RUN else runs[runs >= MIN_RUN]  # many short ones are no chance
    if not len(long):
        return None
    surprise = case.surprise(table.index[zero])
    others = 0.0 if zero.all() else float(np.abs(table.difference[~zero]).mean())
    if surprise < (-LARGEST_SURPRISE if long.max() >= MIN_RUN else LARGEST_SURPRISE):
        return None  # likelier than sampled ones: drawn from fewer tokens, whose only one has a log-prob of 0
    is_open = others > case.level
    return finding(
        "R60.missing" if is_open or surprise < LARGEST_SURPRISE else "R18",
        OPEN_ZEROS if is_open else None,
        count=len(long),
        longest=long.max(),
        trainer=table.trainer[zero].mean(),
        surprise=surprise,
        others=others,
    )


def of_other_tokens(case: Case) -> Finding | None:
    """R12: log-probs of bad rows are those of other tokens, of the same row or of none in the batch.

    In order of size they are the model's; or tokens and log-probs are as likely as sampled ones are
    and have nothing in common.
    """
    if not case.unexplained:
        return None
    table, rows = case.table, np.unique(case.table.sequence)
    bad_rows = rows[breaks(table).mean > BAD_RATIO * case.level]
    bad = np.isin(table.sequence, bad_rows)
    if bad.sum() < FEWEST_FOREIGN or len(bad_rows) < 2:
        return None
    row, engine, trainer = table.sequence[bad], table.engine[bad], table.trainer[bad]
    shared, surprise = correlation(engine, trainer), case.surprise(table.index[bad])
    if shared > SHARED:
        return None
    left = float(np.abs(np.subtract(*(v[np.lexsort((v, row))] for v in (engine, trainer)))).mean())
    if left <= case.level:  # of rows of 100 tokens, chance leaves 0.2
        return finding("R12.order", left=left, apart=np.abs(engine - trainer).mean())
    apart = (engine.mean() - trainer.mean()) / np.sqrt((engine.var() + trainer.var()) / len(engine))
    if max(abs(apart), abs(surprise)) > LARGEST_SURPRISE:
        return None
    return finding("R12.samples", count=len(bad_rows), total=len(rows), shared=shared, surprise=surprise)


def duplicate_samples(case: Case) -> Finding | None:
    """R10: the samples of a prompt are copies of each other: one seed for all of them."""
    if case.sequences.prompt_id is None or case.setting.greedy:
        return None
    shared, num_pairs = longest_shared(case)
    # A pair shares so many nats by chance once in exp(nats); of several pairs, one may.
    copies = [nats for nats in shared if nats - np.log(num_pairs) > RARE_NATS]
    if not copies:
        return None
    greedy = float(np.mean(case.scores.rank[case.scores.rank >= 0] == 0)) > 0.98
    return finding(
        "R10",
        0.85 if greedy else None,  # greedy decoding copies as well, and is then the cause
        copies=len(copies),
        pairs=num_pairs,
        most=max(copies),
        chance=min(copies) - np.log(num_pairs),
    )


def longest_shared(case: Case) -> tuple[list[float], int]:
    """Return the nats of the common beginning of each pair of samples of one prompt, and the pairs.

    A sample is compared with the next one of its prompt in the order of their tokens, which is the
    one that it shares most with.
    """
    sequences = case.sequences
    assert sequences.prompt_id is not None
    nats = np.zeros(len(sequences.input_ids))
    # The smaller one: the trainer's is far too large where it scores after another prompt.
    surprisals = -case.scores.logprob, -sequences.engine_logprobs[sequences.scored]
    nats[sequences.scored] = np.clip(np.nan_to_num(np.minimum(*surprisals)), 0.0, None)
    groups: dict[tuple[int, bytes], list[tuple[list[int], list[float]]]] = {}
    for row in range(sequences.num_rows):
        tokens = sequences.row(row)
        ids, sampled = sequences.input_ids[tokens], sequences.sampled[tokens]
        if sampled.any():
            key = (int(sequences.prompt_id[row]), ids[: int(np.argmax(sampled))].tobytes())
            groups.setdefault(key, []).append((ids[sampled].tolist(), nats[tokens][sampled].tolist()))
    shared = []
    for samples in groups.values():
        for (one, own), (other, _) in itertools.pairwise(sorted(samples)):
            equal = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
            shared.append(float(sum(own[: min(len(one), len(other)) if equal is None else equal])))
    return shared, sum(len(samples) * (len(samples) - 1) // 2 for samples in groups.values())


def context_rewritten_at_a_turn(case: Case) -> Finding | None:
    """R14: from some turn on, the engine saw another history than the recorded one."""
    turn = case.table.turn
    if not case.unexplained or turn.max() == 0:
        return None
    names, means, _ = means_by(turn, np.abs(case.table.difference))
    bad = means > BAD_RATIO * max(means[0], case.level / 2)
    if bad[0] or not bad[1:].any():
        return None
    return finding("R14", means=means_by_name(names[:6], means[:6]), first=int(names[np.argmax(bad)]))


def retokenised(case: Case) -> Finding | None:
    """R13: from some position on, the ids are not those that the engine sampled."""
    if not case.unexplained or case.table.turn.max() > 0:
        return None
    found = breaks(case.table)
    bad = found.mean > case.level
    broken = (
        bad
        & (found.before < 2 * case.level)
        & (found.after_median > case.level)
        & (found.after > BAD_RATIO * np.maximum(found.before, case.level / 2))
    )
    if bad.sum() < 3 or broken.sum() < 0.6 * bad.sum():
        return None
    if np.ptp(np.percentile(found.place[broken], (25, 75))) < 4:
        return None  # from one place of all answers on
    if case.table.version is not None and len(np.unique(case.table.version)) > 1:
        return None  # an update in flight looks the same
    before, after = found.before[broken].mean(), found.after[broken].mean()
    return finding("R13", broken=broken.sum(), bad=bad.sum(), before=before, after=after)


def other_context(case: Case) -> Finding | None:
    """R16: the engine saw another prompt (such as chat template); |D| fades with position.

    Other pictures, and other weights of what reads them, look the same.
    """
    if not case.unexplained or case.sequences.images is not None:
        return None
    size = np.minimum(np.abs(case.table.difference), 5.0)
    line, first, last = trend(case.table.turn_position, size) or (0.0, 0.0, 0.0)
    is_fading = line >= 0.5 and first >= max(1.5 * last, BAD_RATIO * case.level)
    return finding("R16", first=first, last=last) if is_fading else None


# Weights.


def one_tensor_differs(case: Case) -> Finding | None:
    """R24, R25, R26, R65: the change of one tensor, or of all, explains which tokens differ."""
    found = case.changed_tensor
    if found is None or case.explanation is not None:
        return None
    if case.is_of_flips and case.setting.noise.name != "float32":
        return None  # ordinary rounding: of few experts, which then stand out
    if any(check(case) for check in (one_worker_differs, policy_moved, only_decoded_tokens_differ)):
        return None  # all rows of an engine, and of a version, and all tokens have the same weights
    left = f"explains which tokens differ, and leaves {found.noise:.0%} of the difference as noise"
    weighed = f"a change of {found.name} {left}: {found.nats:.0f} nats likelier than noise alone"
    if found.is_open:
        return finding("R24.open", tensor=found.name, weighed=weighed)
    is_vision = found.name == TOWER or any(word in found.name for word in VISION_WORDS)
    is_vocabulary = any(word in found.name for word in VOCABULARY_WORDS)
    moved = moves_of_dtype(case)
    is_rounding = moved is not None and moved[0].std() > moved[1].std() / 2  # may be another dtype
    most = 0.6 if found.name == EVERY or "*" in found.name or is_rounding else 0.9
    id = "R24" if found.name == EVERY else "R65" if is_vision else "R26" if is_vocabulary else "R25"
    return finding(
        f"{id}.tensor",
        min(0.6 + 0.3 * found.margin / SURE_MARGIN, most),
        tensor=found.name,
        weighed=f"{weighed}, {found.margin:.0f} nats than the next tensor",
    )


def policy_moved(case: Case) -> Finding | None:
    """R57: tokens of older versions differ because the policy moved; not a fault.

    Where the model's version is not known, it is the newest one if its tokens agree.
    """
    version = case.table.version
    if version is None or len(np.unique(version)) < 2 or case.mean_abs <= case.level / 2:
        return None
    now = version.max() if case.setting.model_version is None else case.setting.model_version
    lag, means, _ = means_by(now - version, np.abs(case.table.difference))
    if lag[0] != 0 or means[0] > case.level or means[1:].min() < 1.5 * means[0]:
        return None
    return finding("R57", means=means_by_name(lag, means))


def means_by_name(names: Any, means: Floats) -> str:
    return ", ".join(f"{name}: {mean:.2g}" for name, mean in zip(names, means, strict=True))


def cache_kept_over_update(case: Case) -> Finding | None:
    """R29: requests that reused cached keys and values are bad, fresh ones are not.

    Of several engines the sound ones are left out: more of their requests may be fresh by chance.
    """
    cached, row, size = case.table.cached_tokens, case.table.sequence, np.abs(case.table.difference)
    if not case.unexplained or cached is None:
        return None
    if case.table.worker is not None:
        names, means, _ = means_by(case.table.worker, size)
        bad = np.isin(case.table.worker, names[means > case.level])
        cached, row, size = cached[bad], row[bad], size[bad]
    if len(np.unique(cached > 0)) < 2:
        return None
    fresh, reused = float(size[cached == 0].mean()), float(size[cached > 0].mean())
    limit = BAD_RATIO * max(fresh, case.level / 2)
    if reused < limit or chance_of_sound(row, size, cached == 0, limit) > LARGEST_CHANCE:
        return None
    return finding("R29", reused=reused, fresh=fresh)


def chance_of_sound(row: Ints, size: Floats, fresh: Bools, limit: float) -> float:
    """Return how likely no row of those with `fresh` tokens is bad if bad rows are drawn.

    One fresh row of many is sound by chance where half of all rows are.
    """
    rows, means, _ = means_by(row, size)
    num_fresh, num_sound = int(np.isin(rows, row[fresh]).sum()), int((means <= limit).sum())
    return math.comb(num_sound, num_fresh) / math.comb(len(rows), num_fresh)


def update_in_flight(case: Case) -> Finding | None:
    """R30: samples that span a weight update differ before or after it."""
    table, version = case.table, case.table.version
    if not case.unexplained or version is None or len(np.unique(version)) < 2:
        return None
    spans = (np.diff(version) != 0) & (np.diff(table.sequence) == 0)
    mixed = np.isin(table.sequence, table.sequence[np.flatnonzero(spans)])
    if not mixed.any():
        return None
    names, means, _ = means_by(version[mixed], np.abs(table.difference[mixed]))
    if means.max() < BAD_RATIO * max(float(means.min()), case.level / 2):
        return None
    return finding("R30", means=means_by_name(names, means))


def one_worker_differs(case: Case) -> Finding | None:
    """R34: some engines or sequences are bad and the others are not."""
    size, worker = np.abs(case.table.difference), case.table.worker
    if worker is not None and case.explanation is None:
        names, means, _ = means_by(worker, size)
        is_large = case.mean_abs > case.level
        least = BAD_RATIO * max(means.min(), case.level / 2) if is_large else APART_RATIO * means.min()
        bad = means > least
        if not bad.any() or bad.all() or not (is_large or are_apart(case, names[bad])):
            return None
        sure = None if is_large else SMALL_BUT_APART
        return finding(
            "R34", sure, bad=means[bad].mean(), names=names[bad].tolist(), clean=means[~bad].mean()
        )
    if not case.unexplained or policy_moved(case) is not None:
        return None
    mean = breaks(case.table).mean
    bad, clean = mean > BAD_RATIO * case.level, mean < 1.5 * case.level
    if bad.sum() < 2 or clean.sum() < 2 or (bad | clean).mean() < 0.9:
        return None
    return finding(
        "R34.sequences", count=bad.sum(), total=len(bad), bad=mean[bad].mean(), clean=mean[clean].mean()
    )


def are_apart(case: Case, bad: Ints) -> bool:
    """Return whether some engines are clearly noisier than the others, which round as well."""
    assert case.table.worker is not None
    row, size, is_bad = case.table.sequence, np.abs(case.table.difference), np.isin(case.table.worker, bad)
    high, low = (means_by(row[of], size[of])[1] for of in (is_bad, ~is_bad))
    error = np.hypot(high.std() / np.sqrt(len(high)), low.std() / np.sqrt(len(low)))
    return bool(low.mean() > NEGLIGIBLE and high.mean() - low.mean() > APART_ERRORS * error)


def token_bias(case: Case) -> Finding | None:
    """R26, R27, R55: D depends on the token id: output bias or rows of the output layer differ."""
    if not case.unexplained:
        return None
    difference = np.clip(case.table.difference, -5.0, 5.0)
    explains = explained_by_key(case.table.token_id, difference)
    if explains < 0.6:
        return None
    sure = UNRELATED if are_unrelated(case) else None
    names, means, count = means_by(case.table.token_id, np.abs(difference))
    bad = names[(means > BAD_RATIO * max(float(np.median(means)), case.level)) & (count >= 2)]
    share_of_bad = (difference[np.isin(case.table.token_id, bad)] ** 2).sum() / (difference**2).sum()
    if not (0 < len(bad) <= 0.1 * len(names) and share_of_bad > 0.6):
        return finding("R27", sure, share=explains)
    key = "R55" if set(bad.tolist()) <= case.setting.added_token_ids else "R26"
    ids = ", ".join(map(str, bad[:8].tolist()))
    return finding(key, sure, share=explains, count=len(bad), ids=ids)


def bad_share(case: Case) -> float:
    return float(np.mean(breaks(case.table).mean > case.level))


def are_unrelated(case: Case) -> bool:
    metrics = case.measurement.metrics
    return metrics["mean_abs"] >= 1.0 and metrics["logprob_pearson"] <= 0.35


def other_checkpoint(case: Case) -> Finding | None:
    """R33: engine and trainer hold different checkpoints, or perhaps related ones."""
    if not case.unexplained:
        return None
    if not are_unrelated(case):
        first, share = np.abs(case.table.difference[case.table.turn_position == 0]).mean(), bad_share(case)
        is_large = case.mean_abs > BEYOND_NOISE * case.level and first > case.mean_abs / BAD_RATIO
        return finding("R33.related", share=share, first=first) if is_large and share > EVERYWHERE else None
    scores, uniform = case.scores, np.log(max(case.setting.vocabulary_size, 2))
    excess, entropy = (np.nanmean(values) for values in (-scores.logprob - scores.entropy, scores.entropy))
    # Tokens of other weights are about as unlikely as drawn by chance.
    return finding(
        "R12.tokens" if excess < AS_LIKELY * (uniform - entropy) else "R33",
        correlation=case.measurement.metrics["logprob_pearson"],
        trainer=case.table.trainer.mean(),
        uniform=-uniform,
    )


# In the order in which equally certain findings are listed.
CHECKS: tuple[Callable[[Case], Finding | None], ...] = (
    lengths_differ,
    foreign_tokens,
    of_other_tokens,
    duplicate_samples,
    from_replay,
    context_rewritten_at_a_turn,
    retokenised,
    other_context,
    hidden_transform,
    one_tensor_differs,
    policy_moved,
    cache_kept_over_update,
    update_in_flight,
    one_worker_differs,
    token_bias,
    other_checkpoint,
    *CHECKS_OF_NUMBERS,
)
