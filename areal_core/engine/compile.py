"""Transformer layers through torch.compile, in graphs that serve every layer and every micro-batch.

A graph is made for a count of tokens that may change, once for all layers of a class. The lengths of packed sequences would break that:
they are numbers in a list, and a graph is for one length of a list. So they pass through the compiled layer in an object that it
does not look into, and attention, which needs them, is computed between graphs.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from areal_core.engine.errors import ModelError

BACKEND = "inductor"
HIDDEN = ("sequence_lengths", "sequence_parallel")  # options of a layer that are for attention alone


@dataclass(frozen=True)
class Opaque:
    """A value that a compiled layer hands on without a look."""

    value: Any


def compile_layers(model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Compile the forward, and with it the backward, of each layer; before FSDP puts its hooks around them.

    Nothing is compiled before the first micro-batch, which then takes a minute or so.

    Args:
        layers: modules of the model, whose forward takes the `HIDDEN` options.

    Raises:
        ModelError: there is no compiler for the code that torch writes.
    """
    if BACKEND == "inductor":
        refuse_without_compiler(torch.cuda.is_available())
    name = model.config._attn_implementation
    between = f"{name}_between_graphs"
    AttentionInterface.register(between, _between_graphs(ALL_ATTENTION_FUNCTIONS[name]))
    model.set_attn_implementation(between)
    for layer in layers:
        layer.forward = _hiding(torch.compile(layer.forward, dynamic=True, backend=BACKEND))


def refuse_without_compiler(on_gpu: bool) -> None:
    """Raise ModelError where the compiler that inductor calls is missing: for C++ on a CPU, for C of Triton's launchers on a GPU."""
    candidates = [os.environ.get("CC", "gcc"), "clang"] if on_gpu else [os.environ.get("CXX", "g++")]
    if not any(map(shutil.which, candidates)):
        raise ModelError(
            f"fsdp.compile is true and there is no {' or '.join(candidates)} here, which torch.compile calls: "
            f"install it, or set fsdp.compile to false"
        )


def _between_graphs(attention: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable
    def attend(*args: Any, **options: Any) -> Any:
        return attention(*args, **{name: _seen(value) for name, value in options.items()})

    return attend


def _hiding(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **options: Any) -> Any:
        return compiled(*args, **options | {name: Opaque(options[name]) for name in HIDDEN})

    return forward


def _seen(value: Any) -> Any:
    return value.value if isinstance(value, Opaque) else value
