"""The same weights and distribution, computed at different precision."""

import numpy as np

from consistency.case import BAD_RATIO, Case, Finding
from consistency.causes.alignment import MIN_RUN
from consistency.causes.definition import confidence, explained, replay_evidence
from consistency.measure import correlation, tail
from consistency.shape import means_by, run_lengths
from consistency.tokens import Floats

PERIODS = range(2, 9)
DECIMALS = (1, 2, 3)  # four or more are below the noise of any engine
FEWEST_ON_GRID = 50
FEWEST_REPEATED = 5
MOVES_SHARED = 0.4  # correlation of D with what another dtype changes


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
    if on_grid[name] < 0.995:
        return None
    return Finding(
        "R36",
        f"logprobs rounded to {name}",
        0.97,
        f"{on_grid[name]:.1%} of the engine's logprobs are numbers of {name}; of float32 ones fewer than 5 % are",
        "one logprob that is not such a number",
        "log_softmax and transport in float32",
    )


def share_on_decimals(values: Floats, digits: int) -> float:
    scaled = values * 10.0**digits
    scaled = scaled[np.abs(scaled) > 0.5]  # smaller ones round to 0 on any grid
    if len(scaled) < FEWEST_ON_GRID:
        return 0.0
    return float(np.mean(np.abs(scaled - np.round(scaled)) < 1e-6 * np.maximum(1.0, np.abs(scaled))))


def rounded_logits(case: Case) -> Finding | None:
    """R37: the engine's logits are bfloat16 where the trainer's are float32."""
    if case.replays is None or not case.replays.rounding.std() > 1e-5 or case.explanation is not None:
        return None
    residual = np.clip(case.replays.engine - case.replays.base, -0.5, 0.5)
    shared = correlation(residual, case.replays.rounding)
    if shared < 0.15 or shared * np.sqrt(len(residual)) < 8:
        return None
    return Finding(
        "R37",
        "logits in bfloat16 in the engine",
        0.85,
        f"D correlates with the effect of rounding logits to bfloat16: correlation {shared:.2f} over {len(residual)} tokens",
        "float32 logits in the engine: the correlation must vanish",
        "SGLang --enable-fp32-lm-head; or the same dtype in the trainer's output layer",
    )


def other_dtype(case: Case) -> Finding | None:
    """R38: the two sides compute in different dtypes."""
    found = explained(case, "R38")
    if found is not None:
        sure = confidence(found)
        evidence = f"{found.prediction.name} explains the engine's logprobs: {replay_evidence(found)}"
    elif (shared := shared_moves(case)) > MOVES_SHARED:
        sure = 0.85
        evidence = f"D correlates with what the other dtype changes: {shared:.2f}, and is as large"
    else:
        return None
    return Finding(
        "R38",
        "engine and trainer compute in different dtypes",
        sure,
        evidence,
        "run both sides in one dtype: the difference must fall",
        "the same dtype on both sides (SGLang --dtype, trainer dtype)",
        fault=case.mean_abs > case.level,  # below, it is the noise of a dtype that the engine declares
    )


def shared_moves(case: Case) -> float:
    """Correlate D with what another dtype changes; 0 if the sizes differ by over a factor of 2.

    Two kernels of one dtype round differently, so that scoring in it explains D only in part.
    """
    replays = case.replays
    other = [] if replays is None else [p for p in replays.predictions if p.cause == "R38"]
    if replays is None or not other or case.mean_abs <= case.level:
        return 0.0
    moves, difference = other[0].logprobs - replays.base, replays.engine - replays.base
    if not 0.5 < difference.std() / max(float(moves.std()), 1e-12) < 2.0:
        return 0.0
    return correlation(moves, difference)


def quantised_engine(case: Case) -> Finding | None:
    """R44: the engine's weights are quantised, the trainer's are not."""
    found = explained(case, "R44")
    if found is None:
        return None
    return Finding(
        "R44",
        f"the engine's {found.prediction.name}",
        confidence(found),
        f"{found.prediction.name} explain the engine's logprobs: {replay_evidence(found)}",
        "serve the unquantised checkpoint: the difference must fall to the noise of its dtype",
        "serve without --quantization, train with quantised weights in the forward pass, or correct with truncated importance weights",
    )


def other_experts(case: Case) -> Finding | None:
    """R42: the experts that the engine reported explain its logprobs, the trainer's own do not."""
    found = explained(case, "R42")
    if found is None:
        return None
    return Finding(
        "R42",
        "engine and trainer choose different experts",
        confidence(found),
        f"{replay_evidence(found)}: experts are those that the engine returned, weights the trainer's",
        "compare the router's weights and top-k on both sides: if they are equal, only close calls may differ",
        "train with rollout.return_routed_experts=true, or with a float32 router and deterministic kernels on both sides",
    )


def heavy_tail(case: Case) -> Finding | None:
    """R42: most tokens agree and a few differ widely: experts chosen differently."""
    metrics = case.measurement.metrics
    if (
        case.explanation is not None
        or metrics["max_abs"] < 10 * case.level
        or metrics["p50_abs"] > case.level
    ):
        return None
    # Two engines of different noise have together a tail that none of them has.
    worker, size = case.table.worker, case.table.difference
    engines = [size] if worker is None else [size[worker == one] for one in np.unique(worker)]
    tails = map(tail, engines)
    heavy = next((one for one in tails if one["kurtosis"] >= 20 and one["p99_over_p50"] >= 20), None)
    if heavy is None:
        return None
    return Finding(
        "R42",
        "a few tokens differ widely (as from different expert routing)",
        0.7,
        f"kurtosis {heavy['kurtosis']:.0f}, p99 over median {heavy['p99_over_p50']:.0f}, "
        f"{heavy['top_percent_share']:.0%} of |D| in 1 % of the tokens"
        + (" of one engine" if len(engines) > 1 else ""),
        "sample again: routing flips affect other tokens; compare routed_experts (SGLang return_routed_experts)",
        "replay the routing in the trainer, or a float32 router and deterministic kernels (SGLang --enable-deterministic-inference)",
    )


def periodic(case: Case) -> Finding | None:
    """R45: every k-th token is bad: logprobs of accepted draft tokens."""
    if not case.unexplained:
        return None
    size = np.minimum(np.abs(case.table.difference), 5.0)
    for period in PERIODS:
        _, means, count = means_by(case.table.turn_position % period, size)
        clean = means < 1.5 * case.level
        if len(means) < period or count.min() < 20 or not clean.any() or clean.all():
            continue
        if means[~clean].min() > BAD_RATIO * max(float(means[clean].max()), case.level / 2):
            return Finding(
                "R45",
                "wrong logprobs at a fixed period (as from speculative decoding)",
                0.85,
                f"with period {period}, mean |D| by phase is {', '.join(f'{m:.2g}' for m in means)}",
                "sample without speculative decoding: the period must vanish",
                "no speculative decoding in rollouts, or an engine version that reports the target model's logprobs",
            )
    return None


def ordinary_noise(case: Case) -> Finding | None:
    """R35: differences of kernels that round differently; not a fault."""
    metrics, noise = case.measurement.metrics, case.setting.noise
    if case.mean_abs > noise.mean_abs or metrics["k3"] > noise.k3:
        return None
    return Finding(
        "R35",
        f"ordinary noise of {noise.name}",
        0.9,
        f"mean |D| {case.mean_abs:.2g} (healthy up to {noise.mean_abs:g}), k3 {metrics['k3']:.2g} (up to {noise.k3:g}): {noise.source}",
        "score the same tokens twice in the engine: its repeats must differ as much",
        "none needed; truncated importance weights correct for it",
        fault=False,
    )


def unusable_logprobs(case: Case) -> Finding | None:
    """R60: NaN, minus infinity or numbers above 0 among the logprobs."""
    excluded = case.table.excluded
    bad = (
        excluded.engine_nan
        + excluded.engine_minus_infinity
        + excluded.engine_above_zero
        + excluded.trainer_not_finite
    )
    if not bad:
        return None
    share = bad / (bad + len(case.table.engine))
    return Finding(
        "R60",
        "unusable logprobs",
        0.8,
        f"{bad} of {bad + len(case.table.engine)} tokens were excluded: {excluded.engine_nan} NaN, "
        f"{excluded.engine_minus_infinity} minus infinity, "
        f"{excluded.engine_above_zero} above 0 in the engine, {excluded.trainer_not_finite} not finite in the trainer",
        "none may be excluded",
        "inspect these tokens: a token with minus infinity was sampled from another distribution; NaN comes from the kernels",
        fault=share > 0.001,
    )


def placeholder_logprobs(case: Case) -> Finding | None:
    """R60: one number stands in place of logprobs: 0 at the first token, a lower limit."""
    table = case.table
    names, inverse, count = np.unique(table.engine, return_inverse=True, return_counts=True)
    size = np.minimum(np.abs(table.difference), 5.0)
    wrong = np.bincount(inverse, size > max(2 * case.level, 0.01))  # tokens of each number
    best = int(np.argmax(wrong))
    repeated = inverse == best
    if names[best] == 0.0 and run_lengths(repeated, table.sequence).max() >= MIN_RUN:
        return None  # spans of zeros are tokens that were not sampled (R18)
    if wrong[best] < FEWEST_REPEATED or wrong[best] < 0.5 * count[best] or len(names) < 2:
        return None
    if wrong[best] < 0.5 * wrong.sum():
        return None  # most of what is wrong is no placeholder
    if np.ptp(table.trainer[repeated]) < 0.1 or size[repeated].mean() < BAD_RATIO * size[~repeated].mean():
        return None
    return Finding(
        "R60",
        "one number in place of logprobs",
        0.97,
        f"{count[best]} tokens have the logprob {names[best]:.6g} exactly, the trainer's range from {table.trainer[repeated].min():.2g} "
        f"to {table.trainer[repeated].max():.2g}; mean |D| of the others is {size[~repeated].mean():.2g}",
        "no number may repeat that often",
        "look for a default, a lower limit or a first token without a logprob where replies are read",
    )


CAUSES = (
    placeholder_logprobs,
    rounded_logprobs,
    rounded_logits,
    other_dtype,
    quantised_engine,
    periodic,
    other_experts,
    heavy_tail,
    unusable_logprobs,
    ordinary_noise,
)
