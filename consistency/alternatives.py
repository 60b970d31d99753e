"""The same tokens scored otherwise: by another checkpoint or parts of it, in another dtype, quantised, with BOS or without."""

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
    """Another model's scores; `cause` is what it means if they are the engine's (R24 stale, R32 adapter, R38 dtype)."""
    return Alternative(cause, name, score(scorer, sequences, temperature=temperature, top_k=1).logprob)


def partial_alternatives(
    scorer: Scorer, previous: Scorer, sequences: Sequences, temperature: float
) -> list[Alternative]:
    """By the model with one part of its weights, and no other, from the previous checkpoint."""
    names = [name for name, _ in scorer.model.named_parameters()]
    old = dict(previous.model.named_parameters())
    found = []
    for part in dict.fromkeys(part_of(name) for name in names):
        model = copy.deepcopy(scorer.model)
        for name, parameter in model.named_parameters():
            if part_of(name) == part:
                parameter.data = old[name].data.to(parameter.dtype)
        found.append(checkpoint_alternative(scorer_of(model), sequences, "R25", part, temperature))
    return found


def part_of(name: str) -> str:
    """The part of a model that a parameter belongs to: a layer by its number, or the module outside of layers."""
    inside = LAYER.search(name)
    return f"layer {inside[1]}" if inside else name.removeprefix("model.").removesuffix(".weight")


def architecture_alternatives(scorer: Scorer, sequences: Sequences, temperature: float) -> list[Alternative]:
    """By the model with a detail computed as other model families compute it."""
    return [
        checkpoint_alternative(changed(scorer, change), sequences, "R54", name, temperature)
        for name, change in DETAILS.items()
    ]


def changed(scorer: Scorer, change: Callable[[torch.nn.Module], None]) -> Scorer:
    """A copy of the model, changed in every module."""
    model = copy.deepcopy(scorer.model)
    for module in model.modules():
        change(module)
    return scorer_of(model)


def shift_norm(module: torch.nn.Module, by: float) -> None:
    """Adds to the weight of a norm: Gemma scales by 1 + weight, most others by the weight."""
    if is_norm(module):
        module.get_parameter("weight").data += by


def set_epsilon(module: torch.nn.Module, epsilon: float) -> None:
    """Sets what a norm adds to the variance, under either of the names that Transformers gives it."""
    for name in ("variance_epsilon", "eps"):
        if is_norm(module) and name in vars(module):
            setattr(module, name, epsilon)


def is_norm(module: torch.nn.Module) -> bool:
    """Whether the module is a norm with a weight."""
    return type(module).__name__.endswith("Norm") and "weight" in dict(module.named_parameters(recurse=False))


LAYER = re.compile(r"layers\.(\d+)\.")
DETAILS: dict[str, Callable[[torch.nn.Module], None]] = {
    "norms scaled by 1 + weight": partial(shift_norm, by=1.0),
    "norms scaled by weight - 1": partial(shift_norm, by=-1.0),
    "norms with epsilon 1e-5": partial(set_epsilon, epsilon=1e-5),
    "norms with epsilon 1e-6": partial(set_epsilon, epsilon=1e-6),
}


def quantized_alternatives(scorer: Scorer, sequences: Sequences, temperature: float) -> list[Alternative]:
    """By the model with the weights of its linear layers rounded as an engine's weight-only quantisation rounds them."""
    return [
        checkpoint_alternative(quantized(scorer, scheme), sequences, "R44", f"weights in {name}", temperature)
        for name, scheme in SCHEMES.items()
    ]


def quantized(scorer: Scorer, scheme: Callable[[Tensor], Tensor]) -> Scorer:
    """A copy of the model whose linear layers, all but the output layer, hold rounded weights."""
    model = copy.deepcopy(scorer.model)
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = scheme(module.weight.data.float()).to(module.weight.dtype)
    return scorer_of(model)


def rounded_to_float8(weight: Tensor) -> Tensor:
    """float8 e4m3 with one scale an output channel; [out, in] float32 to the same."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def rounded_to_integers(weight: Tensor, bits: int, group: int | None) -> Tensor:
    """Symmetric integers with one scale an output channel, or one a `group` of inputs; [out, in] float32 to the same."""
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
    """With one BOS more; and with one less where every row begins with one."""
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
    """Whether every row begins with the token."""
    return bool((sequences.input_ids[sequences.cu_seqlens[:-1]] == token_id).all())


def with_first(sequences: Sequences, token_id: int) -> Sequences:
    """Every row with a token put before it."""
    begins = sequences.cu_seqlens[:-1]
    return Sequences(
        input_ids=np.insert(sequences.input_ids, begins, token_id),
        sampled=np.insert(sequences.sampled, begins, False),
        engine_logprobs=np.insert(sequences.engine_logprobs, begins, 0.0),
        cu_seqlens=sequences.cu_seqlens + np.arange(len(sequences.cu_seqlens)),
    )


def without_first(sequences: Sequences) -> Sequences:
    """Every row without its first token."""
    begins = sequences.cu_seqlens[:-1]
    return Sequences(
        input_ids=np.delete(sequences.input_ids, begins),
        sampled=np.delete(sequences.sampled, begins),
        engine_logprobs=np.delete(sequences.engine_logprobs, begins),
        cu_seqlens=sequences.cu_seqlens - np.arange(len(sequences.cu_seqlens)),
    )
