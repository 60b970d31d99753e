"""Both sides are right and speak of different distributions: temperature, truncation, penalties, units."""

import numpy as np

from consistency.case import Case, Explanation, Finding
from consistency.tokens import Floats

T_TOLERANCE = 0.02


def explained(case: Case, cause: str, *names: str) -> Explanation | None:
    """The accepted explanation, if it is of this cause (and has one of these names)."""
    found = case.explanation
    if found is None or found.prediction.cause != cause or (names and found.prediction.name not in names):
        return None
    return found


def confidence(found: Explanation) -> float:
    """From how many times smaller the residual became: 0.6 at the least gain that is accepted, 0.99 from 20 on."""
    return float(np.clip(0.6 + 0.39 * np.log(found.gain / 1.5) / np.log(20 / 1.5), 0.6, 0.99))


def replayed(found: Explanation) -> str:
    """The evidence of a replay in words."""
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
        f"{replayed(found)}: {what}, the trainer's of {trainer:g}",
        "score again at that temperature: the difference must fall to the noise of the precision",
        "one temperature on both sides; vLLM: --logprobs-mode processed_logprobs; SGLang: unset SGLANG_RETURN_ORIGINAL_LOGPROB; "
        "trainer: actor.temperature equal to gconfig.temperature",
    )


def applied_twice(case: Case, engine: float) -> bool:
    """Whether a fitted temperature is the recorded one squared, or its inverse."""
    recorded = case.setting.temperature
    return (
        abs(recorded - 1.0) > T_TOLERANCE
        and min(abs(engine - recorded**2), abs(engine - 1 / recorded)) < T_TOLERANCE
    )


def temperature_twice(case: Case) -> Finding | None:
    """R02: the temperature was applied twice, or inverted."""
    found = explained(case, "R01", "temperature")
    if found is None or not applied_twice(case, found.prediction.parameter):
        return None
    return Finding(
        "R02",
        "temperature applied twice or inverted",
        confidence(found),
        f"{replayed(found)}; the recorded temperature is {case.setting.temperature:g}, whose square is {case.setting.temperature**2:.3g}",
        "sample at temperature 1: the difference must vanish",
        "divide logits by the temperature in one place only, on each side",
    )


def truncation_renormalised(case: Case) -> Finding | None:
    """R03: the engine reports logprobs renormalised over the tokens that top-p, top-k or min-p kept."""
    found = explained(case, "R03")
    if found is None:
        return None
    metrics, p = case.measurement.metrics, found.prediction
    return Finding(
        "R03",
        f"{p.name} renormalises the engine's logprobs",
        confidence(found),
        f"{replayed(found)}; {metrics['share_positive']:.1%} of D above 0; mean ratio {metrics['ratio_mean']:.3f}, the mass kept",
        f"sample without {p.name}: D must become two-sided",
        "sample with top_p 1, top_k -1, min_p 0 (SGLang: sampling_params; vLLM: also --generation-config vllm), or let the trainer "
        "renormalise over the kept tokens",
    )


def drawn_from_truncation(case: Case) -> Finding | None:
    """R04: the tokens were drawn from a truncated distribution, while the reported logprobs are of the whole one."""
    if (
        case.drawn_by is None
        or case.drawn_by[0].cause != "R03"
        or case.explanation is not None
        or case.unexplained
    ):
        return None
    law, nats = case.drawn_by
    return Finding(
        "R04",
        f"tokens drawn with {law.name}, logprobs of the full distribution",
        0.95,
        f"the tokens are {nats:.0f} nats likelier under {law.name} {law.parameter:g} than under the trainer (Z = {case.surprise:+.1f}), "
        f"though the logprobs agree (mean |D| {case.mean_abs:.2g}); highest rank {case.scores.rank.max()}, "
        f"most mass before a token {np.nanmax(case.scores.mass_before):.3f}",
        f"sample without {law.name}: Z must come within +-3",
        "sample with top_p 1, top_k -1, min_p 0, or weigh the loss by the mass that was kept; metrics of logprobs cannot see this",
    )


def drawn_at_another_temperature(case: Case) -> Finding | None:
    """R01, reported raw: logprobs agree, and the tokens were drawn at another temperature."""
    if (
        case.drawn_by is None
        or case.drawn_by[0].cause != "R01"
        or case.explanation is not None
        or case.unexplained
    ):
        return None
    law, nats = case.drawn_by
    return Finding(
        "R01",
        "tokens drawn at another temperature than their logprobs",
        0.9,
        f"the tokens are {nats:.0f} nats likelier at temperature {law.parameter:.3g} than at {case.setting.temperature:g} "
        f"(Z = {case.surprise:+.1f}), though the logprobs agree (mean |D| {case.mean_abs:.2g})",
        "sample at the trainer's temperature: Z must come within +-3",
        "vLLM: --logprobs-mode processed_logprobs; SGLang: unset SGLANG_RETURN_ORIGINAL_LOGPROB; record the temperature that was used",
    )


def penalty(case: Case) -> Finding | None:
    """R05: a repetition, frequency or presence penalty on the engine's side alone."""
    found = explained(case, "R05")
    hidden = case.drawn_by if case.explanation is None and not case.unexplained else None
    if found is None and (hidden is None or hidden[0].cause != "R05"):
        return None
    if found is not None:
        law, evidence, sure = found.prediction, replayed(found), confidence(found)
    else:
        law, nats = hidden  # type: ignore[misc]
        evidence, sure = (
            f"the tokens are {nats:.0f} nats likelier under {law.name} {law.parameter:.3g}, though the logprobs agree",
            0.85,
        )
    return Finding(
        "R05",
        f"{law.name} in the engine",
        sure,
        f"{evidence}; tokens that did not occur before are hardly touched",
        "compare tokens that occur for the first time: they must agree",
        f"send {law.name.split()[0]} explicitly ({'1.0' if 'repetition' in law.name else '0.0'}); generation_config.json may set it: "
        "vLLM --generation-config vllm, SGLang --sampling-defaults openai",
    )


def forbidden_eos(case: Case) -> Finding | None:
    """R06: EOS was forbidden for the first tokens, and its probability went to the others."""
    found = explained(case, "R06")
    if found is None:
        return None
    place = found.prediction.parameter
    where = "everywhere" if np.isinf(place) else f"for the first {place:.0f} tokens"
    return Finding(
        "R06",
        f"EOS forbidden {where}",
        confidence(found),
        f"D is log(1 - p(EOS)) {where}: {replayed(found)}",
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
        f"engine = trainer {found.prediction.parameter:+.4g} for every token; {replayed(found)}",
        "the spread of D must be that of noise once the constant is taken off",
        "look for bookkeeping that adds to logprobs where they are recorded",
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
        f"engine = {found.prediction.parameter:.4g} x trainer; {replayed(found)}",
        "convert to natural logarithms: the difference must fall to noise",
        "convert where the engine's reply is read",
    )


def wrong_token(case: Case) -> Finding | None:
    """R09: the reported logprob is that of the likeliest token, not of the sampled one."""
    found = explained(case, "R09")
    if found is None:
        return None
    rank = case.scores.rank
    argmax = float(np.mean(rank[rank >= 0] == 0))
    return Finding(
        "R09",
        "logprob of the likeliest token",
        confidence(found),
        f"the engine tells the distribution's largest logprob, and only {argmax:.0%} of the tokens are the likeliest; {replayed(found)}",
        "look at a token whose rank is above 0: its logprob must be below the largest",
        "read the sampled token's row: SGLang output_token_logprobs, vLLM logprobs=0",
    )


def log_units(engine: Floats, trainer: Floats) -> Finding | None:
    """R08: numbers above 0, which are probabilities, or negative logprobs of the wrong sign. Looks before anything is averaged."""
    finite = np.isfinite(engine)
    if finite.sum() < 2 or np.mean(engine[finite] > 0) < 0.5:
        return None
    values, own = engine[finite], trainer[finite]
    with np.errstate(divide="ignore", invalid="ignore"):
        as_probability = (
            np.median(np.abs(np.log(values) - own)) if (values <= 1).all() and (values > 0).all() else np.inf
        )
    as_negative = np.median(np.abs(-values - own))
    name = (
        "probabilities instead of logprobs"
        if as_probability < as_negative
        else "negative log-likelihoods instead of logprobs"
    )
    return Finding(
        "R08",
        name,
        0.97,
        f"{np.mean(values > 0):.0%} of the engine's numbers are above 0; read as such they differ from the trainer by "
        f"{min(as_probability, as_negative):.2g} in the median",
        "no logprob can be above 0",
        "convert where the engine's reply is read; the numbers below are after converting",
    )


def in_logprobs(finding: Finding, engine: Floats) -> Floats:
    """The engine's numbers converted as `log_units` found."""
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
