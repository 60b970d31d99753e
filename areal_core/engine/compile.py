"""Transformer layers through torch.compile, in graphs shared by all layers and micro-batches.

A graph has a dynamic number of tokens, and is compiled once for all layers of a class. The lengths
of packed sequences would cause recompilation: they are numbers in a list, and a graph is
specialised on the length of a list. So they pass through the compiled layer in an opaque object,
and attention, which needs them, runs in a graph break.
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
ATTENTION_OPTIONS = ("sequence_lengths", "sequence_parallel")  # options of a layer that only attention uses


@dataclass(frozen=True)
class Opaque:
    """A value that passes through a compiled layer without specialising its graph."""

    value: Any


def compile_layers(model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Compile the forward, and with it the backward, of each layer.

    Call it before FSDP adds its hooks. Compilation happens in the first micro-batch, which then
    takes about a minute.

    Args:
        layers: modules of the model whose forward has the options `ATTENTION_OPTIONS`.

    Raises:
        ModelError: there is no compiler for the code that torch generates.
    """
    if BACKEND == "inductor":
        refuse_without_compiler(torch.cuda.is_available())
    name = model.config._attn_implementation
    between = f"{name}_between_graphs"
    AttentionInterface.register(between, _between_graphs(ALL_ATTENTION_FUNCTIONS[name]))
    model.set_attn_implementation(between)
    for layer in layers:
        layer.forward = _with_opaque_options(torch.compile(layer.forward, dynamic=True, backend=BACKEND))


def refuse_without_compiler(on_gpu: bool) -> None:
    """Raise ModelError where the compiler that inductor calls is missing.

    That is a C++ compiler on a CPU, and on a GPU a C compiler, for Triton's launchers.
    """
    candidates = [os.environ.get("CC", "gcc"), "clang"] if on_gpu else [os.environ.get("CXX", "g++")]
    if not any(map(shutil.which, candidates)):
        raise ModelError(
            f"fsdp.compile is true and {' or '.join(candidates)} is not installed, which torch.compile calls: "
            f"install it, or set fsdp.compile to false"
        )


def _between_graphs(attention: Callable[..., Any]) -> Callable[..., Any]:
    def attend(*args: Any, **options: Any) -> Any:
        return attention(*args, **{name: _unwrapped(value) for name, value in options.items()})

    return torch.compiler.disable(attend)


def _with_opaque_options(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **options: Any) -> Any:
        return compiled(*args, **options | {name: Opaque(options[name]) for name in ATTENTION_OPTIONS})

    return forward


def _unwrapped(value: Any) -> Any:
    return value.value if isinstance(value, Opaque) else value
