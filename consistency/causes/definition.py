"""Both sides are correct for different distributions: temperature, truncation, penalties, units."""

import numpy as np

from consistency.case import Case, Explanation, Finding
from consistency.hypotheses import Prediction
from consistency.tokens import Floats

T_TOLERANCE = 0.02


def explained(case: Case, cause: str, *names: str) -> Explanation | None:
    """Return the accepted explanation if it has this cause (and one of these names)."""
    found = case.explanation
    if found is None or found.prediction.cause != cause or (names and found.prediction.name not in names):
        return None
    return found


def confidence(found: Explanation) -> float:
    """Map the gain, residual before over after, to 0.6 (least accepted gain) to 0.99 (from 20)."""
    return float(np.clip(0.6 + 0.39 * np.log(found.gain / 1.5) / np.log(20 / 1.5), 0.6, 0.99))


def replay_evidence(found: Explanation) -> str:
    p = found.prediction
    value = f" {p.parameter:g}" if p.parameter else ""
    return (
        f"replaying {p.name}{value} leaves a residual {found.gain:.1f} times smaller ({found.residual:.2g})"
    )


def temperature_differs(case: Case) -> Finding | None:
    """R01: the engine's logprobs are of another temperature than the trainer's."""
    found = explained(case, "R01", "temperature")
    if found is None or applied_twice(case, found.prediction.parameter):
        return None
    engine, trainer = found.prediction.parameter, case.setting.temperature
    raw = abs(engine - 1.0) < T_TOLERANCE
    what = (
        "the engine reports raw logprobs (temperature 1)"
        if raw
        else f"the engine's logprobs are of temperature {engine:.3g}"
    )
    return Finding(
        "R01",
        "temperature differs",
        confidence(found),
        f"{replay_evidence(found)}: {what}, the trainer's of {trainer:g}",
        "score again at that temperature: the difference must fall to the noise of the precision",
        "one temperature on both sides; vLLM: --logprobs-mode processed_logprobs; SGLang: unset SGLANG_RETURN_ORIGINAL_LOGPROB; "
        "trainer: actor.temperature equal to gconfig.temperature",
    )


def applied_twice(case: Case, engine: float) -> bool:
    recorded = case.setting.temperature
    return (
        abs(recorded - 1.0) > T_TOLERANCE
        and min(abs(engine - recorded**2), abs(engine - 1 / recorded)) < T_TOLERANCE
    )


def temperature_twice(case: Case) -> Finding | None:
    found = explained(case, "R01", "temperature")
    if found is None or not applied_twice(case, found.prediction.parameter):
        return None
    return Finding(
        "R02",
        "temperature applied twice or inverted",
        confidence(found),
        f"{replay_evidence(found)}; the recorded temperature is {case.setting.temperature:g}, "
        f"whose square is {case.setting.temperature**2:.3g}",
        "sample at temperature 1: the difference must vanish",
        "divide logits by the temperature in one place only, on each side",
    )


def truncation_renormalised(case: Case) -> Finding | None:
    """R03: the engine's logprobs are renormalised over the tokens kept by top-p, top-k or min-p."""
    found = explained(case, "R03")
    if found is None:
        return None
    metrics, p = case.measurement.metrics, found.prediction
    return Finding(
        "R03",
        f"{p.name} renormalises the engine's logprobs",
        confidence(found),
        f"{replay_evidence(found)}; {metrics['share_positive']:.1%} of D above 0; mean ratio {metrics['ratio_mean']:.3f} (the mass kept)",
        f"sample without {p.name}: D must become two-sided",
        "sample with top_p 1, top_k -1, min_p 0 (SGLang: sampling_params; vLLM: also --generation-config vllm), or let the trainer "
        "renormalise over the kept tokens",
    )


def hidden_transform(case: Case, cause: str) -> tuple[Prediction, float] | None:
    if case.drawn_by is None or case.explanation is not None or case.unexplained:
        return None
    return case.drawn_by if case.drawn_by[0].cause == cause else None


def drawn_from_truncation(case: Case) -> Finding | None:
    """R04: tokens drawn from a truncated distribution, logprobs reported of the full one."""
    hidden = hidden_transform(case, "R03")
    if hidden is None:
        return None
    transform, nats = hidden
    return Finding(
        "R04",
        f"tokens drawn with {transform.name}, logprobs of the full distribution",
        0.95,
        f"the tokens are {nats:.0f} nats likelier under {transform.name} {transform.parameter:g} than under the trainer "
        f"(Z = {case.surprise:+.1f}), though the logprobs agree (mean |D| {case.mean_abs:.2g}); highest rank {case.scores.rank.max()}, "
        f"most mass before a token {np.nanmax(case.scores.mass_before):.3f}",
        f"sample without {transform.name}: Z must come within +-3",
        "sample with top_p 1, top_k -1, min_p 0, or weigh the loss by the mass that was kept; metrics of logprobs cannot see this",
    )


def drawn_at_another_temperature(case: Case) -> Finding | None:
    hidden = hidden_transform(case, "R01")
    if hidden is None:
        return None
    transform, nats = hidden
    return Finding(
        "R01",
        "tokens drawn at another temperature than their logprobs",
        0.9,
        f"the tokens are {nats:.0f} nats likelier at temperature {transform.parameter:.3g} than at {case.setting.temperature:g} "
        f"(Z = {case.surprise:+.1f}), though the logprobs agree (mean |D| {case.mean_abs:.2g})",
        "sample at the trainer's temperature: Z must come within +-3",
        "vLLM: --logprobs-mode processed_logprobs; SGLang: unset SGLANG_RETURN_ORIGINAL_LOGPROB; record the temperature that was used",
    )


def penalty(case: Case) -> Finding | None:
    """R05: a repetition, frequency or presence penalty on the engine's side alone."""
    found = explained(case, "R05")
    hidden = hidden_transform(case, "R05")
    if found is not None:
        transform, evidence, sure = found.prediction, replay_evidence(found), confidence(found)
    elif hidden is not None:
        transform, nats = hidden
        evidence, sure = (
            f"the tokens are {nats:.0f} nats likelier under {transform.name} {transform.parameter:.3g}, "
            "though the logprobs agree",
            0.85,
        )
    else:
        return None
    return Finding(
        "R05",
        f"{transform.name} in the engine",
        sure,
        f"{evidence}; tokens that did not occur before hardly change",
        "compare tokens that occur for the first time: they must agree",
        f"send {transform.name.split()[0]} explicitly ({'1.0' if 'repetition' in transform.name else '0.0'}); "
        "generation_config.json may set it: vLLM --generation-config vllm, SGLang --sampling-defaults openai",
    )


def forbidden_eos(case: Case) -> Finding | None:
    """R06: EOS was forbidden for the first tokens, so other tokens got its probability."""
    found = explained(case, "R06")
    if found is None:
        return None
    place = found.prediction.parameter
    where = "everywhere" if np.isinf(place) else f"for the first {place:.0f} tokens"
    return Finding(
        "R06",
        f"EOS forbidden {where}",
        confidence(found),
        f"D is log(1 - p(EOS)) {where}: {replay_evidence(found)}",
        "sample with min_new_tokens 0 and ignore_eos false: the difference must vanish",
        "gconfig.min_new_tokens 0 and ignore_eos false, or forbid the same token in the trainer; likewise logit_bias and grammars",
    )


def constant_offset(case: Case) -> Finding | None:
    """R07: every logprob is off by the same number."""
    found = explained(case, "R07")
    if found is None:
        return None
    return Finding(
        "R07",
        "constant offset",
        confidence(found),
        f"engine = trainer {found.prediction.parameter:+.4g} for every token; {replay_evidence(found)}",
        "without the constant, the spread of D must be that of noise",
        "look for code that adds a constant to logprobs where they are recorded",
    )


def other_units(case: Case) -> Finding | None:
    """R08: logarithms to base 2 or 10."""
    found = explained(case, "R08")
    if found is None:
        return None
    return Finding(
        "R08",
        found.prediction.name,
        confidence(found),
        f"engine = {found.prediction.parameter:.4g} x trainer; {replay_evidence(found)}",
        "convert to natural logarithms: the difference must fall to noise",
        "convert where the engine's reply is read",
    )


def wrong_token(case: Case) -> Finding | None:
    """R09: the reported logprob is that of the most likely token, not of the sampled one."""
    found = explained(case, "R09")
    if found is None:
        return None
    rank = case.scores.rank
    argmax = float(np.mean(rank[rank >= 0] == 0))
    return Finding(
        "R09",
        "logprob of the most likely token",
        confidence(found),
        f"the engine reports the largest logprob, but only {argmax:.0%} of the tokens are the most likely; {replay_evidence(found)}",
        "inspect a token with a rank above 0: its logprob must be below the largest",
        "read the sampled token's row: SGLang output_token_logprobs, vLLM logprobs=0",
    )


def log_units(engine: Floats, trainer: Floats) -> Finding | None:
    """R08: values above 0 are probabilities or negative log-likelihoods.

    Runs before anything is averaged.
    """
    finite = np.isfinite(engine)
    if finite.sum() < 2 or np.mean(engine[finite] > 0) < 0.5:
        return None
    values, expected = engine[finite], trainer[finite]
    with np.errstate(divide="ignore", invalid="ignore"):
        as_probability = (
            np.median(np.abs(np.log(values) - expected))
            if (values <= 1).all() and (values > 0).all()
            else np.inf
        )
    as_negative = np.median(np.abs(-values - expected))
    name = (
        "probabilities instead of logprobs"
        if as_probability < as_negative
        else "negative log-likelihoods instead of logprobs"
    )
    return Finding(
        "R08",
        name,
        0.97,
        f"{np.mean(values > 0):.0%} of the engine's numbers are above 0; after converting, they differ from the trainer by "
        f"{min(as_probability, as_negative):.2g} in the median",
        "no logprob can be above 0",
        "convert where the engine's reply is read; the metrics below are after converting",
    )


def in_logprobs(finding: Finding, engine: Floats) -> Floats:
    """Convert the engine's numbers as `log_units` found."""
    if "negative" in finding.name:
        return -engine
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(engine, 0))


CAUSES = (
    temperature_differs,
    temperature_twice,
    truncation_renormalised,
    drawn_from_truncation,
    drawn_at_another_temperature,
    penalty,
    forbidden_eos,
    constant_offset,
    other_units,
    wrong_token,
)
