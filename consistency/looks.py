"""Probes: score the sampled tokens again under alternative settings while the verdict is in doubt.

Each probe costs some forward passes over the sample, so probing stops at the first settled verdict.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from consistency.alternatives import (
    architecture_alternatives,
    bos_alternatives,
    checkpoint_alternative,
    partial_alternatives,
    quantized_alternatives,
)
from consistency.case import Alternative, Setting
from consistency.diagnose import Diagnosis, is_accusation
from consistency.noise import noise_of_model
from consistency.replay import Replays
from consistency.request import DTYPES, Request
from consistency.score import Scorer, load_scorer
from consistency.tokens import Sequences

SETTLED_CONFIDENCE = 0.85
Diagnose = Callable[..., Diagnosis]  # diagnose(setting, alternatives=...)


@dataclass(frozen=True)
class ProbeInputs:
    """The sampled rows, the model that scores them in `dtype`, and how they were sampled."""

    scorer: Scorer
    rows: Sequences
    request: Request
    setting: Setting
    dtype: str


Probe = Callable[[ProbeInputs], list[Alternative]]


def run_probes(diagnose: Diagnose, inputs: ProbeInputs, replays: Replays) -> tuple[Diagnosis, Setting]:
    """Probe until the verdict is settled or no probe is left.

    Returns:
        The last diagnosis, and the setting with the noise floor of this model.
    """
    setting = inputs.setting
    found = diagnose(setting)
    alternatives: list[Alternative] = []
    for probe in PROBES:
        if is_settled(found):
            break
        alternatives += probe(inputs)
        if probe is probe_dtype:
            setting = replace(setting, noise=noise_of_model(setting.noise, alternatives[0], replays))
        found = diagnose(setting, alternatives=alternatives)
    return found, setting


def is_settled(found: Diagnosis) -> bool:
    """Return whether another probe could hardly change the verdict."""
    return found.verdict == "healthy" or any(
        is_accusation(cause) and cause.confidence > SETTLED_CONFIDENCE for cause in found.causes
    )


def probe_dtype(inputs: ProbeInputs) -> list[Alternative]:
    """Score in the other dtype."""
    other = "bfloat16" if inputs.dtype == "float32" else "float32"
    model = load_scorer(inputs.request.model, DTYPES[other], inputs.request.device)
    temperature = inputs.setting.temperature
    return [checkpoint_alternative(model, inputs.rows, "R38", f"scoring in {other}", temperature)]


def probe_bos(inputs: ProbeInputs) -> list[Alternative]:
    """Score with one BOS more and one less."""
    bos_token_id = inputs.setting.bos_token_id
    if bos_token_id is None:
        return []
    return bos_alternatives(inputs.scorer, inputs.rows, bos_token_id, inputs.setting.temperature)


def probe_quantization(inputs: ProbeInputs) -> list[Alternative]:
    """Score with the weights rounded as weight-only quantisation rounds them."""
    return quantized_alternatives(inputs.scorer, inputs.rows, inputs.setting.temperature)


def probe_checkpoints(inputs: ProbeInputs) -> list[Alternative]:
    """Score with the request's other checkpoints: stale weights (R24), missing adapter (R32)."""
    request = inputs.request
    wanted = (("R24", "the previous checkpoint", request.previous), ("R32", "the base model", request.base))
    return [
        checkpoint_alternative(
            load_scorer(path, DTYPES[inputs.dtype], request.device),
            inputs.rows,
            cause,
            name,
            inputs.setting.temperature,
        )
        for cause, name, path in wanted
        if path is not None
    ]


def probe_partial_update(inputs: ProbeInputs) -> list[Alternative]:
    """Score with one module at a time from the previous checkpoint, if the request names one."""
    request = inputs.request
    if request.previous is None:
        return []
    previous = load_scorer(request.previous, DTYPES[inputs.dtype], request.device)
    return partial_alternatives(inputs.scorer, previous, inputs.rows, inputs.setting.temperature)


def probe_architecture(inputs: ProbeInputs) -> list[Alternative]:
    """Score with a detail of the architecture computed as other model families do."""
    return architecture_alternatives(inputs.scorer, inputs.rows, inputs.setting.temperature)


PROBES: tuple[Probe, ...] = (
    probe_dtype,
    probe_bos,
    probe_checkpoints,
    probe_quantization,
    probe_architecture,
    probe_partial_update,
)
