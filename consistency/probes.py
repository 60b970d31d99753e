"""Probes: score the sampled tokens again under alternative settings while the verdict is in doubt.

A probe is another checkpoint, dtype, quantisation, BOS or detail of the architecture. Each costs
some forward passes over the sample, so probing stops at the first settled verdict. Probes also set
the noise floor: the published level of a precision, raised by what model or engine show.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from consistency.candidates.experts import expert_alternatives
from consistency.candidates.pixels import image_alternatives, tower_alternative
from consistency.candidates.positions import rotary_alternatives
from consistency.candidates.prompts import prompt_alternatives
from consistency.candidates.stale_tensors import find_stale_tensors, swapped
from consistency.candidates.tensors import find_changed_tensor
from consistency.case import DTYPES, Alternative, Noise, Request, Setting
from consistency.cross_checks import Rescoring
from consistency.diagnose import Diagnosis, is_accusation
from consistency.hypotheses import Replays, usable_or
from consistency.measure import k3
from consistency.score import Scorer, load_scorer, score_logprobs, scorer_of
from consistency.tokens import Sequences

# Two rounding kernels differ more than a rounding one from an exact one: sqrt(2), with a margin.
NOISE_MARGIN = 1.6

SETTLED_CONFIDENCE = 0.85
LEAST_TO_WEIGH = 1e-5  # mean |D|; float32 kernels on CPUs differ by 1e-6
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
        # Whatever is accused, the noise floor of this model is needed to weigh it.
        if is_settled(found) and (probe is not probe_dtype or found.verdict == "healthy"):
            break
        alternatives += probe(inputs)
        if probe is probe_dtype:
            setting = replace(setting, noise=noise_of_model(setting.noise, alternatives[0], replays))
        found = diagnose(setting, alternatives=alternatives)
    if not is_settled(found) or is_small_for_noise(found, setting):
        changed = find_changed_tensor(inputs.scorer, inputs.rows, setting.temperature)
        found = diagnose(setting, alternatives=alternatives, changed_tensor=changed)
    return found, setting


def is_small_for_noise(found: Diagnosis, setting: Setting) -> bool:
    size = found.measurement.metrics["mean_abs"]
    return found.verdict == "healthy" and setting.noise.name == "float32" and size > LEAST_TO_WEIGH


def is_settled(found: Diagnosis) -> bool:
    """Return whether another probe could hardly change the verdict."""
    return found.verdict == "healthy" or any(
        is_accusation(cause) and cause.confidence > SETTLED_CONFIDENCE for cause in found.causes
    )


def probe_dtype(inputs: ProbeInputs) -> list[Alternative]:
    other = "bfloat16" if inputs.dtype == "float32" else "float32"
    model = load_scorer(inputs.request.model, DTYPES[other], inputs.request.device)
    temperature = inputs.setting.temperature
    return [checkpoint_alternative(model, inputs.rows, "R38", f"scoring in {other}", temperature)]


def probe_bos(inputs: ProbeInputs) -> list[Alternative]:
    bos_token_id = inputs.setting.bos_token_id
    if bos_token_id is None:
        return []
    return bos_alternatives(inputs.scorer, inputs.rows, bos_token_id, inputs.setting.temperature)


def probe_quantization(inputs: ProbeInputs) -> list[Alternative]:
    return quantized_alternatives(inputs.scorer, inputs.rows, inputs.setting.temperature)


def probe_checkpoints(inputs: ProbeInputs) -> list[Alternative]:
    """Score with the request's other checkpoints: stale weights (R24), missing adapter (R32)."""
    request, temperature = inputs.request, inputs.setting.temperature
    wanted = (("R24", "the previous checkpoint", request.previous), ("R32", "the base model", request.base))
    found = []
    for cause, name, path in wanted:
        if path is not None:
            other = load_scorer(path, DTYPES[inputs.dtype], request.device)
            found += tower_alternative(inputs.scorer, other, inputs.rows, name, temperature)
            found.append(checkpoint_alternative(other, inputs.rows, cause, name, temperature))
    return found


def probe_partial_update(inputs: ProbeInputs) -> list[Alternative]:
    request = inputs.request
    if request.previous is None:
        return []
    previous = load_scorer(request.previous, DTYPES[inputs.dtype], request.device)
    return partial_alternatives(inputs.scorer, previous, inputs.rows, inputs.setting.temperature)


def probe_architecture(inputs: ProbeInputs) -> list[Alternative]:
    return architecture_alternatives(inputs.scorer, inputs.rows, inputs.setting.temperature)


def probe_positions(inputs: ProbeInputs) -> list[Alternative]:
    return rotary_alternatives(inputs.scorer, inputs.rows, inputs.setting.temperature)


def probe_experts(inputs: ProbeInputs) -> list[Alternative]:
    return expert_alternatives(inputs.scorer, inputs.rows, inputs.setting.temperature)


def probe_images(inputs: ProbeInputs) -> list[Alternative]:
    return image_alternatives(inputs.scorer, inputs.rows, inputs.setting.temperature)


def probe_prompts(inputs: ProbeInputs) -> list[Alternative]:
    base = score_logprobs(inputs.scorer, inputs.rows, temperature=inputs.setting.temperature)
    return prompt_alternatives(inputs.scorer, inputs.rows, base, inputs.setting.temperature)


PROBES: tuple[Probe, ...] = (
    probe_dtype,
    probe_experts,
    probe_bos,
    probe_images,
    probe_prompts,
    probe_checkpoints,
    probe_quantization,
    probe_architecture,
    probe_positions,
    probe_partial_update,
)


def checkpoint_alternative(
    scorer: Scorer, sequences: Sequences, cause: str, name: str, temperature: float
) -> Alternative:
    return Alternative(cause, name, score_logprobs(scorer, sequences, temperature=temperature))


def partial_alternatives(
    scorer: Scorer, previous: Scorer, sequences: Sequences, temperature: float
) -> list[Alternative]:
    """Score with those tensors of the previous checkpoint that explain the logprobs (R25)."""
    base = score_logprobs(scorer, sequences, temperature=temperature)
    values = sequences.engine_logprobs.copy()
    values[sequences.scored] = usable_or(values[sequences.scored], base)
    stale = find_stale_tensors(scorer, previous, replace(sequences, engine_logprobs=values), temperature)
    if stale is None:
        return []
    with swapped(scorer, previous, stale.names):
        return [checkpoint_alternative(scorer, sequences, "R25", stale.describe(), temperature)]


def architecture_alternatives(scorer: Scorer, sequences: Sequences, temperature: float) -> list[Alternative]:
    return [
        checkpoint_alternative(changed(scorer, change), sequences, "R54", name, temperature)
        for name, change in DETAILS.items()
    ]


def changed(scorer: Scorer, change: Callable[[torch.nn.Module], None]) -> Scorer:
    """Copy the model with `change` applied to every module."""
    model = copy.deepcopy(scorer.model)
    for module in model.modules():
        change(module)
    return scorer_of(model, scorer.processor)


def shift_norm(module: torch.nn.Module, by: float) -> None:
    """Add to the weight of a norm: Gemma scales by 1 + weight, most others by the weight."""
    if is_norm(module):
        module.get_parameter("weight").data += by


def set_epsilon(module: torch.nn.Module, epsilon: float) -> None:
    for name in ("variance_epsilon", "eps"):
        if is_norm(module) and name in vars(module):
            setattr(module, name, epsilon)


def is_norm(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("Norm") and "weight" in dict(module.named_parameters(recurse=False))


DETAILS: dict[str, Callable[[torch.nn.Module], None]] = {
    "norms scaled by 1 + weight": partial(shift_norm, by=1.0),
    "norms scaled by weight - 1": partial(shift_norm, by=-1.0),
    **{
        f"norms with epsilon {epsilon:.0e}": partial(set_epsilon, epsilon=epsilon)
        for epsilon in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
    },
}


def quantized_alternatives(scorer: Scorer, sequences: Sequences, temperature: float) -> list[Alternative]:
    return [
        checkpoint_alternative(quantized(scorer, scheme), sequences, "R44", f"weights in {name}", temperature)
        for name, scheme in SCHEMES.items()
    ]


def quantized(scorer: Scorer, scheme: Callable[[Tensor], Tensor]) -> Scorer:
    model = copy.deepcopy(scorer.model)
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = scheme(module.weight.data.float()).to(module.weight.dtype)
    return scorer_of(model, scorer.processor)


def rounded_to_float8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def rounded_to_integers(weight: Tensor, bits: int, group: int | None) -> Tensor:
    groups = weight if group is None or weight.shape[1] % group else weight.reshape(-1, group)
    most = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-12) / most
    return ((groups / scale).round().clamp(-most - 1, most) * scale).reshape(weight.shape)


SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    "float8": rounded_to_float8,
    "int8": partial(rounded_to_integers, bits=8, group=None),
    "int4": partial(rounded_to_integers, bits=4, group=128),
}


def bos_alternatives(
    scorer: Scorer, sequences: Sequences, bos_token_id: int, temperature: float
) -> list[Alternative]:
    found = [
        (
            "double BOS" if begins_with(sequences, bos_token_id) else "BOS that the record lacks",
            with_first(sequences, bos_token_id),
        )
    ]
    if begins_with(sequences, bos_token_id):
        found.append(("missing BOS", without_first(sequences)))
    return [
        Alternative("R15", name, score_logprobs(scorer, changed, temperature=temperature))
        for name, changed in found
        if len(changed.scored) == len(sequences.scored)
    ]


def begins_with(sequences: Sequences, token_id: int) -> bool:
    """Return whether every row begins with the token."""
    return bool((sequences.input_ids[sequences.cu_seqlens[:-1]] == token_id).all())


def with_first(sequences: Sequences, token_id: int) -> Sequences:
    begins = sequences.cu_seqlens[:-1]
    return Sequences(
        input_ids=np.insert(sequences.input_ids, begins, token_id),
        sampled=np.insert(sequences.sampled, begins, False),
        engine_logprobs=np.insert(sequences.engine_logprobs, begins, 0.0),
        cu_seqlens=sequences.cu_seqlens + np.arange(len(sequences.cu_seqlens)),
        images=sequences.images,
    )


def without_first(sequences: Sequences) -> Sequences:
    begins = sequences.cu_seqlens[:-1]
    return Sequences(
        input_ids=np.delete(sequences.input_ids, begins),
        sampled=np.delete(sequences.sampled, begins),
        engine_logprobs=np.delete(sequences.engine_logprobs, begins),
        cu_seqlens=sequences.cu_seqlens - np.arange(len(sequences.cu_seqlens)),
        images=sequences.images,
    )


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
    variation = NOISE_MARGIN * rescoring.engine_repeat
    if not variation > published.mean_abs:
        return published
    return Noise(
        f"{published.name}, on this engine",
        variation,
        max(published.k3, variation**2),
        f"two engine scorings of the same tokens differ by {rescoring.engine_repeat:.2g} on average",
    )
