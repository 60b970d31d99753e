"""Score the same tokens with another checkpoint, dtype, quantisation, BOS or architecture."""

import copy
import re
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from consistency.case import Alternative
from consistency.score import Scorer, score, scorer_of
from consistency.tokens import Sequences


def checkpoint_alternative(
    scorer: Scorer, sequences: Sequences, cause: str, name: str, temperature: float
) -> Alternative:
    """Score with another model; `cause` is the verdict if its scores are the engine's."""
    return Alternative(cause, name, score(scorer, sequences, temperature=temperature, top_k=1).logprob)


def partial_alternatives(
    scorer: Scorer, previous: Scorer, sequences: Sequences, temperature: float
) -> list[Alternative]:
    """Score with one module at a time from the previous checkpoint (R25)."""
    names = [name for name, _ in scorer.model.named_parameters()]
    old = dict(previous.model.named_parameters())
    found = []
    for module in dict.fromkeys(module_of(name) for name in names):
        model = copy.deepcopy(scorer.model)
        for name, parameter in model.named_parameters():
            if module_of(name) == module:
                parameter.data = old[name].data.to(parameter.dtype)
        found.append(checkpoint_alternative(scorer_of(model), sequences, "R25", module, temperature))
    return found


def module_of(name: str) -> str:
    """Return the layer of a parameter, such as `layer 3`, or its module outside of layers."""
    inside = LAYER.search(name)
    return f"layer {inside[1]}" if inside else name.removeprefix("model.").removesuffix(".weight")


def architecture_alternatives(scorer: Scorer, sequences: Sequences, temperature: float) -> list[Alternative]:
    """Score with one detail computed as other model families do (R54)."""
    return [
        checkpoint_alternative(changed(scorer, change), sequences, "R54", name, temperature)
        for name, change in DETAILS.items()
    ]


def changed(scorer: Scorer, change: Callable[[torch.nn.Module], None]) -> Scorer:
    """Copy the model with `change` applied to every module."""
    model = copy.deepcopy(scorer.model)
    for module in model.modules():
        change(module)
    return scorer_of(model)


def shift_norm(module: torch.nn.Module, by: float) -> None:
    """Add to the weight of a norm: Gemma scales by 1 + weight, most others by the weight."""
    if is_norm(module):
        module.get_parameter("weight").data += by


def set_epsilon(module: torch.nn.Module, epsilon: float) -> None:
    """Set the epsilon of a norm, under either of its names in Transformers."""
    for name in ("variance_epsilon", "eps"):
        if is_norm(module) and name in vars(module):
            setattr(module, name, epsilon)


def is_norm(module: torch.nn.Module) -> bool:
    """Return whether the module is a norm with a weight."""
    return type(module).__name__.endswith("Norm") and "weight" in dict(module.named_parameters(recurse=False))


LAYER = re.compile(r"layers\.(\d+)\.")
DETAILS: dict[str, Callable[[torch.nn.Module], None]] = {
    "norms scaled by 1 + weight": partial(shift_norm, by=1.0),
    "norms scaled by weight - 1": partial(shift_norm, by=-1.0),
    "norms with epsilon 1e-5": partial(set_epsilon, epsilon=1e-5),
    "norms with epsilon 1e-6": partial(set_epsilon, epsilon=1e-6),
}


def quantized_alternatives(scorer: Scorer, sequences: Sequences, temperature: float) -> list[Alternative]:
    """Score with linear layers rounded as by an engine's weight-only quantisation (R44)."""
    return [
        checkpoint_alternative(quantized(scorer, scheme), sequences, "R44", f"weights in {name}", temperature)
        for name, scheme in SCHEMES.items()
    ]


def quantized(scorer: Scorer, scheme: Callable[[Tensor], Tensor]) -> Scorer:
    """Copy the model with the weights of all linear layers but the output layer rounded."""
    model = copy.deepcopy(scorer.model)
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = scheme(module.weight.data.float()).to(module.weight.dtype)
    return scorer_of(model)


def rounded_to_float8(weight: Tensor) -> Tensor:
    """Round [out, in] float32 to float8 e4m3 with one scale per output channel."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def rounded_to_integers(weight: Tensor, bits: int, group: int | None) -> Tensor:
    """Round [out, in] float32 to integers with one scale per output channel or input group."""
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
    """Score with one BOS more, and with one less if every row begins with one (R15)."""
    found = [
        (
            "double BOS" if begins_with(sequences, bos_token_id) else "BOS that the record lacks",
            with_first(sequences, bos_token_id),
        )
    ]
    if begins_with(sequences, bos_token_id):
        found.append(("missing BOS", without_first(sequences)))
    return [
        Alternative("R15", name, score(scorer, changed, temperature=temperature, top_k=1).logprob)
        for name, changed in found
        if len(changed.scored) == len(sequences.scored)
    ]


def begins_with(sequences: Sequences, token_id: int) -> bool:
    """Return whether every row begins with the token."""
    return bool((sequences.input_ids[sequences.cu_seqlens[:-1]] == token_id).all())


def with_first(sequences: Sequences, token_id: int) -> Sequences:
    """Prepend a token to every row."""
    begins = sequences.cu_seqlens[:-1]
    return Sequences(
        input_ids=np.insert(sequences.input_ids, begins, token_id),
        sampled=np.insert(sequences.sampled, begins, False),
        engine_logprobs=np.insert(sequences.engine_logprobs, begins, 0.0),
        cu_seqlens=sequences.cu_seqlens + np.arange(len(sequences.cu_seqlens)),
    )


def without_first(sequences: Sequences) -> Sequences:
    """Drop the first token of every row."""
    begins = sequences.cu_seqlens[:-1]
    return Sequences(
        input_ids=np.delete(sequences.input_ids, begins),
        sampled=np.delete(sequences.sampled, begins),
        engine_logprobs=np.delete(sequences.engine_logprobs, begins),
        cu_seqlens=sequences.cu_seqlens - np.arange(len(sequences.cu_seqlens)),
    )
