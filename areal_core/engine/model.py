"""Loading of a Hugging Face causal language model on the CPU, and two ways to make it faster.

`compile_layers` (`fsdp.compile`) runs transformer layers through torch.compile, in graphs that all
layers and micro-batches share. A graph has a dynamic number of tokens, and is compiled once for all
layers of a class. The lengths of packed sequences would cause recompilation: they are numbers in a
list, and a graph is specialised on the length of a list. So they pass through the compiled layer in
an opaque object, and attention, which needs them, runs in a graph break.

`apply_liger` (`use_liger`) replaces norms and gated MLPs by the fused kernels of the package
liger-kernel, only on a GPU; results differ in the last bits. Rotary embeddings are not replaced:
Liger would replace them for every model in the process. Cross-entropy is computed in `logprobs.py`.
"""

import copy
import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from areal_core.config.vision_checks import FAMILIES
from areal_core.engine.attention import PACKED
from areal_core.errors import ModelError, first_line, load_failure

BACKEND = "inductor"  # of torch.compile
ATTENTION_OPTIONS = (
    "sequence_lengths",
    "sequence_parallel",
    "key_blocks",
)  # options of a layer that only attention uses


def load_model(
    path: str,
    *,
    dtype: torch.dtype | str = torch.float32,
    attn_implementation: str = PACKED,
    init_from_scratch: bool = False,
    disable_dropout: bool = False,
    without_weights: bool = False,
) -> PreTrainedModel:
    """Load a causal language model, or a vision model, on the CPU.

    Args:
        path: a folder in Hugging Face format, or a hub name.
        dtype: of the parameters, "auto" for the checkpoint's own. Training loads float32, the
            master weights; the sharding policy casts for compute.
        attn_implementation: `PACKED` for training; "sdpa" for generation. A class that has no
            exchangeable attention, or not this one, keeps its own; a vision tower computes SDPA.
        init_from_scratch: initialise random weights from the config, with torch's current seed.
        without_weights: build it on "meta", for weights from another source.

    Raises:
        ModelError: there is no readable model at `path`.
    """
    transformers_logging.disable_progress_bar()  # a bar per rank and load would bury the run's own output
    try:
        config = AutoConfig.from_pretrained(path)
        if disable_dropout:
            without_dropout(config)
        refuse_other_families(path, config)
        supported = attn_implementation if supports_attention(config, attn_implementation) else None
        options = {"dtype": dtype, "attn_implementation": supported and attention_option(config, supported)}
        kind: Any = AutoModelForImageTextToText if is_vision(config) else AutoModelForCausalLM
        if without_weights:
            with torch.device("meta"):
                return with_published_names(kind.from_config(config, **options))
        if init_from_scratch:
            return with_published_names(kind.from_config(config, **options))
        return kind.from_pretrained(path, config=config, **options)
    except Exception as error:  # files of any content lead to errors of any type in Transformers
        raise load_failure(path, error) from error


def load_tokenizer_at(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, or of a model on the hub; ModelError if there is none."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # of any type, see `load_model`
        raise ModelError(f"cannot load the tokenizer at {path!r}: {first_line(error)}") from error


def refuse_other_families(path: str, config: PretrainedConfig) -> None:
    """Raise ModelError for a vision model of a family that is not supported."""
    if getattr(config, "vision_config", None) is None or is_vision(config):
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{path!r} is a vision model of type {config.model_type!r}, which is not supported: "
            f"use one of {', '.join(FAMILIES)}, or a text model"
        )


def is_vision(config: PretrainedConfig) -> bool:
    """Return whether a config is of a vision model whose pictures training supports."""
    return hasattr(config, "vision_config") and config.model_type in FAMILIES


def attention_option(config: PretrainedConfig, implementation: str) -> str | dict[str, str]:
    """Return Transformers' option for an attention; a vision tower keeps SDPA."""
    if not is_vision(config):
        return implementation
    return {"": "sdpa", "vision_config": "sdpa", "text_config": implementation}


def supports_attention(config: PretrainedConfig, implementation: str) -> bool:
    try:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config.get_text_config())]
    except KeyError:  # code of its own, or no language model: loading says so
        return True
    needs_sdpa = "sdpa" in implementation
    return model_class._can_set_attn_implementation() and (model_class._supports_sdpa or not needs_sdpa)


@cache
def cache_argument(forward: Callable[..., Any]) -> str:
    """Return which argument of forward takes the cache: Transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def own_attention(model: PreTrainedModel) -> str:
    """Return the name of the attention that computes what the class defines.

    SDPA leaves out the soft cap of attention scores.
    """
    has_softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "sdpa" if model._supports_sdpa and not has_softcap else "eager"


@contextmanager
def attention_of(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Let the model compute attention by that name in the body, if its class can exchange it."""
    before = model.config.get_text_config()._attn_implementation
    set_attention(model, implementation)
    try:
        yield
    finally:
        set_attention(model, before)


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Let the model compute attention by that name, if its class can exchange it."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(attention_option(model.config, implementation))


def dropout_options(config: PretrainedConfig) -> dict[str, float]:
    names = ("dropout", "pdrop", "dropout_prob", "dropout_p")
    options = config.to_dict().items()
    return {name: value for name, value in options if isinstance(value, float) and name.endswith(names)}


def without_dropout(config: PretrainedConfig) -> None:
    """Set every dropout probability to 0, before the model is built: its modules keep copies."""
    for name in dropout_options(config):
        setattr(config, name, 0.0)


def config_to_save(model: PreTrainedModel, weights: Iterable[Tensor]) -> PretrainedConfig:
    """Return the config of the model's checkpoint, with the dtype of the weights to save with it.

    Options that training changed, dropout, are those of the checkpoint again if it is still there.
    """
    config = copy.deepcopy(model.config)
    try:
        original = dropout_options(AutoConfig.from_pretrained(str(model.name_or_path)))
    except (OSError, ValueError):
        original = {}
    for name, value in original.items():
        setattr(config, name, value)
    config.dtype = next(tensor.dtype for tensor in weights if tensor.is_floating_point())
    return config


def checkpoint_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the name in a checkpoint on the hub of each parameter of a vision model.

    Transformers renames them when it loads one. It is empty for a text model.
    """
    if not is_vision(model.config):
        return {}
    names = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        (names[name],) = revert_weight_conversion(model, {name: torch.empty(0)})
    return names


def with_published_names(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model that no checkpoint was loaded into; `checkpoint_names` gives published ones.

    Transformers assumes the names that it would write itself.
    """
    if is_vision(model.config):
        left_out = () if FAMILIES[model.config.model_type].nests_tower else (PrefixChange,)
        renamings = get_model_conversion_mapping(model, add_legacy=False)
        untyped: Any = model
        untyped._weight_conversions = [each for each in renamings if not isinstance(each, left_out)]
    return model


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
    name = model.config.get_text_config()._attn_implementation
    between = f"{name}_between_graphs"
    AttentionInterface.register(between, _between_graphs(ALL_ATTENTION_FUNCTIONS[name]))
    set_attention(model, between)
    for layer in layers:
        compiled = torch.compile(layer.forward, dynamic=True, backend=BACKEND)
        layer.forward = _with_opaque_options(compiled, layer.forward)


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
        plain = {name: value.value if isinstance(value, Opaque) else value for name, value in options.items()}
        return attention(*args, **plain)

    return torch.compiler.disable(attend)


def _with_opaque_options(compiled: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **options: Any) -> Any:
        hidden = [name for name in ATTENTION_OPTIONS if name in options]
        if not hidden:  # one row, which is not packed
            return plain(*args, **options)
        return compiled(*args, **options | {name: Opaque(options[name]) for name in hidden})

    return forward


def apply_liger(model: PreTrainedModel, device: str) -> None:
    """Replace the norms and MLPs of a model whose family Liger supports.

    Raises:
        ModelError: the device is not a GPU, the package is missing, or it does not support the
            family.
    """
    if device != "cuda":
        raise ModelError(
            f"use_liger is true and the device is {device!r}: Liger's kernels are written in Triton and need a GPU; "
            f"set use_liger to false"
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise ModelError(
            "use_liger is true and liger-kernel is not installed: pip install 'areal-debug[liger]', "
            "or set use_liger to false"
        )
    from liger_kernel.transformers import monkey_patch

    family = model.config.model_type
    if family not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ModelError(
            f"use_liger is true and Liger has no kernels for {family!r} models: set use_liger to false"
        )
    apply = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[family]
    apply(rope=False, cross_entropy=False, fused_linear_cross_entropy=False, model=model)
