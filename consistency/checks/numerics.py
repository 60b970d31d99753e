"""Checks of numbers: second scorings of the same tokens, rounding, dtypes, and the tail of D."""

from collections.abc import Callable

import numpy as np

from consistency.case import BAD_RATIO, LARGEST_SURPRISE, Case
from consistency.causes import Finding, finding
from consistency.checks.shape import MIN_RUN, run_lengths
from consistency.measure import correlation, means_by, tail
from consistency.rescoring import NOISE_FACTOR
from consistency.tokens import Floats

MOST_DRAFTS = 8  # tokens of a draft
LEAST_CHANCE = -18.0  # log of the chance that runs are so short: once in 60 million comparisons
DECIMALS = (1, 2, 3)  # four or more are below the noise of any engine
FEWEST_ON_GRID = 50  # tokens
FEWEST_REPEATED = 5  # tokens
UNIFORM = 1e-3  # nats from the logprob of a uniform distribution, as of an output layer of zeros
MOVES_SHARED = 0.4  # correlation of D with what another dtype changes
FEWEST_PREFILLED = 8  # first tokens of turns
MOST_ROWS = 0.8  # of the rows must have wrong tokens after the first
EXACT_PREFILL = 20.0  # times the |D| of first tokens that the others have, where a prefill is exact
NO_ROUTER = 0.55  # confidence in a tail of a model without experts: what made it stays open
THIN = 0.6  # confidence in noise of published size that this model's own rounding does not reach
NEAR, NEAR_SHARE = 0.75, 0.5  # confidence in noise of more than this share of what rounding explains
FEW_TOKENS = 200  # below which a healthy difference is less sure
LARGEST_BIAS = 4.0  # t of the mean of D, clustered by sequence; rounding has no direction


def trainer_differs(case: Case) -> Finding | None:
    """R20: the trainer's packed path differs from the model, so the fault is the trainer's."""
    check = case.trainer_check
    if check is None or not check.is_at_fault(case.level):
        return None
    return finding(
        "R20.explained" if check.explanation else "R20",
        how=check.explanation,
        trainer=check.trainer_model,
        tokens=check.num_tokens,
        engine=check.engine_model,
    )


def decoding_differs(case: Case) -> Finding | None:
    """R40, R43, R48: the engine's decoding differs from its prefill, which matches the model."""
    rescoring, dtype = case.rescoring, case.setting.kv_cache_dtype
    if rescoring is None or rescoring.decode is None:
        return None
    floor = NOISE_FACTOR * max(case.level, rescoring.engine_repeat)
    decode, prefill, repeat = rescoring.decode, rescoring.prefill, rescoring.engine_repeat
    if decode <= floor:
        return None
    if prefill >= decode / NOISE_FACTOR:
        if case.mean_abs > case.level:  # both differ from the model
            return None
        return finding("R40.prefill", decode=decode, prefill=prefill, sampled=case.mean_abs)
    return finding(of_decoding(case), dtype=dtype, decode=decode, prefill=prefill, repeat=repeat)


def of_decoding(case: Case) -> str:
    """Return the cause of a decoding that is wrong where the prefill is right."""
    dtype = case.setting.kv_cache_dtype
    if dtype is not None and "8" in dtype:
        return "R43"
    return "R48" if case.setting.has_linear_attention else "R40"


def only_decoded_tokens_differ(case: Case) -> Finding | None:
    """R40, R43, R48: the first token of each turn, which a prefill gives, agrees; no other does.

    First tokens that agree far better than the others show that the assumed noise is not there.
    """
    size, first = np.minimum(np.abs(case.table.difference), 5.0), case.table.turn_position == 0
    second = case.table.turn_position == 1
    if min(first.sum(), second.sum()) < FEWEST_PREFILLED:
        return None
    prefilled, next_ones, decoded = size[first].mean(), size[second].mean(), size[~first].mean()
    is_exact = case.level / 2 < decoded and prefilled < decoded / EXACT_PREFILL and case.explanation is None
    level = min(case.level, decoded / BAD_RATIO**2) if is_exact else case.level
    bad_rows = means_by(case.table.sequence[~first], size[~first])[1] > BAD_RATIO * level / 2
    is_clean = prefilled <= level / 2 and np.quantile(size[first], 0.9) <= level
    is_bad = next_ones >= decoded / 3 and bad_rows.mean() >= MOST_ROWS
    if not ((case.unexplained or is_exact) and is_clean and is_bad):
        return None
    return finding(
        f"{of_decoding(case)}.first",
        dtype=case.setting.kv_cache_dtype,
        count=int(first.sum()),
        prefilled=prefilled,
        decoded=decoded,
    )


def batch_variant(case: Case) -> Finding | None:
    """R39: the model's logprobs depend on the batch by more than its dtype allows."""
    alone = case.rescoring.model_alone if case.rescoring is not None else 0.0
    return finding("R39", alone=alone) if alone > NOISE_FACTOR * case.level else None


def placeholder_logprobs(case: Case) -> Finding | None:
    """R60: one number stands in place of logprobs: 0 at the first token, a lower limit."""
    table = case.table
    names, inverse, count = np.unique(table.engine, return_inverse=True, return_counts=True)
    size = np.minimum(np.abs(table.difference), 5.0)
    wrong = np.bincount(inverse, size > max(2 * case.level, 0.01))  # tokens of each number
    best = int(np.argmax(wrong))
    repeated = inverse == best
    is_span = run_lengths(repeated, table.sequence).max() >= MIN_RUN
    if names[best] == 0.0 and (is_span or case.surprise(table.index[repeated]) >= LARGEST_SURPRISE):
        return None  # spans of zeros, or of unlikely tokens: were they sampled at all?
    if wrong[best] < FEWEST_REPEATED or wrong[best] < 0.5 * count[best]:
        return None
    is_uniform = abs(names[best] + np.log(max(case.setting.vocabulary_size, 2))) < UNIFORM
    if wrong[best] < 0.5 * wrong.sum() or is_uniform:
        return None  # most of what is wrong is no placeholder, or every token is as likely
    trainer, others = table.trainer[repeated], size[~repeated].mean() if len(names) > 1 else 0.0
    if np.ptp(trainer) < 0.1 or size[repeated].mean() < BAD_RATIO * others:
        return None
    low, high = trainer.min(), trainer.max()
    return finding("R60.repeated", count=count[best], number=names[best], low=low, high=high, others=others)


def rounded_logprobs(case: Case) -> Finding | None:
    """R36: the reported logprobs were rounded to bfloat16, float16, or a few decimal places."""
    values = case.table.engine[case.table.engine != 0].astype(np.float32)
    if len(values) < FEWEST_ON_GRID:
        return None
    on_grid = {
        "bfloat16": float(np.mean(values.view(np.uint32) & 0xFFFF == 0)),
        "float16": float(np.mean(values.astype(np.float16).astype(np.float32) == values)),
    } | {f"{digits} decimal places": share_on_decimals(case.table.engine, digits) for digits in DECIMALS}
    name = max(on_grid, key=lambda key: on_grid[key])
    return finding("R36", grid=name, share=on_grid[name]) if on_grid[name] >= 0.995 else None


def share_on_decimals(values: Floats, digits: int) -> float:
    scaled = values * 10.0**digits
    scaled = scaled[np.abs(scaled) > 0.5]  # smaller ones round to 0 on any grid
    if len(scaled) < FEWEST_ON_GRID:
        return 0.0
    return float(np.mean(np.abs(scaled - np.round(scaled)) < 1e-6 * np.maximum(1.0, np.abs(scaled))))


def other_dtype(case: Case) -> Finding | None:
    """R38: D is as large as what another dtype changes, and correlates with it.

    Two kernels of one dtype round differently, so that scoring in it explains D only in part.
    """
    moved = moves_of_dtype(case)
    if moved is None or case.mean_abs <= case.level:
        return None
    if case.explanation is not None and case.explanation.prediction.cause == "R38":
        return None
    moves, difference = moved
    if not 0.5 < difference.std() / max(float(moves.std()), 1e-12) < 2.0:
        return None
    shared = correlation(moves, difference)
    shown = f"D correlates with what the other dtype changes: {shared:.2f}, and is as large"
    return finding("R38", replay=shown) if shared > MOVES_SHARED else None


def moves_of_dtype(case: Case) -> tuple[Floats, Floats] | None:
    """Return what scoring in another dtype changes, and D with the other sign; None if not scored."""
    replays = case.replays
    scored = [] if replays is None else [p.logprobs for p in replays.predictions if p.cause == "R38"]
    if replays is None or not scored:
        return None
    return scored[0] - replays.base, replays.engine - replays.base


def accepted_drafts(case: Case) -> Finding | None:
    """R45: never more than k wrong tokens in succession: logprobs of accepted draft tokens.

    Tokens that are wrong independently of each other would have longer runs.
    """
    if not case.unexplained:
        return None
    wrong = np.abs(case.table.difference) > 2 * case.level
    runs = run_lengths(wrong, case.table.sequence)
    longest, share = int(runs.max(initial=0)), float(wrong.mean())
    if not 0 < longest <= MOST_DRAFTS or len(runs) < 2 * len(np.unique(case.table.sequence[wrong])):
        return None
    if len(runs) * np.log1p(-(share**longest)) > LEAST_CHANCE:
        return None
    return finding("R45", longest=longest, share=share, runs=len(runs))


def heavy_tail(case: Case) -> Finding | None:
    """R42: most tokens agree and a few differ widely: experts chosen differently."""
    metrics = case.measurement.metrics
    if case.explanation is not None:
        return None
    if metrics["max_abs"] < 10 * case.level or metrics["p50_abs"] > case.level:
        return None
    # Two engines of different noise have together a tail that none of them has, and so have two policies.
    version, size = case.table.version, np.where(case.table.engine != 0.0, case.table.difference, 0.0)
    worker = np.zeros(len(size)) if case.table.worker is None else case.table.worker
    own = np.full(len(size), True) if version is None else version == version.max()
    tails = [tail(size[own & (worker == one)]) for one in np.unique(worker[own])]
    heavy = next((one for one in tails if one["kurtosis"] >= 20 and one["p99_over_p50"] >= 20), None)
    if heavy is None:
        return None
    return finding(
        "R42.tail",
        None if case.setting.has_experts else NO_ROUTER,
        like=" (as from different expert routing)" if case.setting.has_experts else "",
        kurtosis=heavy["kurtosis"],
        p99=heavy["p99_over_p50"],
        top=heavy["top_percent_share"],
        of_one=" of one engine" if len(tails) > 1 else "",
        is_fault=not case.is_of_flips,
    )


def unusable_logprobs(case: Case) -> Finding | None:
    """R60: NaN, minus infinity or numbers above 0 among the logprobs."""
    excluded = case.table.excluded
    nan, minus, above = excluded.engine_nan, excluded.engine_minus_infinity, excluded.engine_above_zero
    bad = nan + minus + above + excluded.trainer_not_finite
    if not bad:
        return None
    total, trainer = bad + len(case.table.engine), excluded.trainer_not_finite
    is_fault = bad / total > 0.001
    return finding(
        "R60", bad=bad, total=total, nan=nan, minus=minus, above=above, trainer=trainer, is_fault=is_fault
    )


def ordinary_noise(case: Case) -> Finding | None:
    """R35: differences of kernels that round differently; not a fault."""
    k3, noise = case.measurement.metrics["k3"], case.setting.noise
    if case.mean_abs > noise.mean_abs or k3 > noise.k3:
        return None
    most = min(noise.mean_abs, noise.own)
    is_near, is_thin = case.mean_abs > NEAR_SHARE * most, case.mean_abs > most
    own = f"; rounding explains {most:.2g} in this model, so a small fault is not excluded"
    doubts = [own] * is_near + [f"; {doubt}" for doubt in undecided(case)]
    return finding(
        "R35",
        THIN if is_thin else NEAR if doubts else None,
        own="".join(doubts),
        noise=noise.name,
        mean_abs=case.mean_abs,
        limit=noise.mean_abs,
        k3=k3,
        k3_limit=noise.k3,
        source=noise.source,
    )


def undecided(case: Case) -> list[str]:
    """Return what was measured that ordinary noise does not explain, and that accuses nothing."""
    measured, surprise = case.measurement, case.surprise()
    bias, is_sampled = measured.metrics["t_clustered"], not case.setting.greedy
    found = {
        f"only {measured.num_tokens} tokens were compared": measured.num_tokens < FEW_TOKENS,
        f"D has a direction (t = {bias:+.1f}), and rounding has none": abs(bias) > LARGEST_BIAS,
        f"the tokens are not as likely as sampled ones are (Z = {surprise:+.1f})": is_sampled
        and abs(surprise) > LARGEST_SURPRISE,
    }
    return [doubt for doubt, is_seen in found.items() if is_seen]


CHECKS_OF_NUMBERS: tuple[Callable[[Case], Finding | None], ...] = (
    trainer_differs,
    decoding_differs,
    only_decoded_tokens_differ,
    batch_variant,
    placeholder_logprobs,
    rounded_logprobs,
    other_dtype,
    accepted_drafts,
    heavy_tail,
    unusable_logprobs,
    ordinary_noise,
)
