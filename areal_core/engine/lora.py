"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen model, through peft.

A linear layer W becomes W + alpha / rank * B A. Only A [rank, in] and B [out, rank] are trained,
with float32 master weights; B is initialised to 0, so that a new adapter changes nothing. Frozen
parameters have no optimizer and need no master weights: they are stored in the compute dtype.

The adapters are layers of the model itself, inserted before it is sharded, so that sharding,
packing, gradient checkpointing and the output layer work as without them. Optimizer, checkpoints
and checksums use `trained_parameters`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_core.engine.logits import output_layer
from areal_core.engine.scores import HEAD, is_score_model, score_head
from areal_core.engine.sharding import full_tensor
from areal_core.engine.vision_models import text_model, vision_family
from areal_core.errors import ModelError

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"
ADAPTER = "default"  # peft's name of the only adapter, which it omits from the names in files
FILE_PREFIX = "base_model.model."
TENSORS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class Adapter:
    """The configuration of an adapter.

    Args:
        base_model: path of the checkpoint that it is trained on.
        has_scores: it is of a reward model or a value model, whose head is fully trained.
    """

    rank: int
    alpha: int
    base_model: str
    has_scores: bool = False

    @property
    def scaling(self) -> float:
        """The factor on B A."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class AdapterTensors:
    """The full trained tensors of a model with an adapter, float32, under peft's names in files.

    Iterating is a collective; it can be iterated again.
    """

    model: nn.Module
    device: torch.device

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in trained_parameters(self.model).items():
            full = full_tensor(parameter.detach().to(self.device))
            yield FILE_PREFIX + name.replace(f".{ADAPTER}.", "."), full


@dataclass(frozen=True)
class MergedTensors:
    """The weights W + alpha / rank * B A under the names of the base model.

    It can be iterated again if `weights` can.

    Args:
        weights: every full tensor of the adapted model in float32; those of a layer are
            consecutive.
        dtype: of the result; the sum is computed in float32.
    """

    weights: Iterable[tuple[str, Tensor]]
    scaling: float
    dtype: torch.dtype

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        weight = down = torch.empty(0)
        for name, tensor in self.weights:
            layer, _, part = name.partition(".base_layer.")
            if part == "weight":
                weight = tensor
            elif ".lora_A." in name:
                down = tensor
            elif ".lora_B." in name:
                merged = merged_weight(weight, down, tensor, self.scaling)
                yield name.partition(".lora_B.")[0] + ".weight", merged.to(self.dtype)
            else:
                yield f"{layer}.{part}" if part else name, tensor.to(self.dtype)


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """Return W [out, in] + scaling * B [out, rank] @ A [rank, in] in float32.

    In bfloat16 both the product and the sum would round away most of an update.
    """
    return weight.float() + scaling * (up.float() @ down.float())


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter that is not frozen; with adapters, those and a score head."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def add_adapters(
    model: PreTrainedModel,
    adapter: Adapter,
    target_modules: Sequence[str],
    *,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Freeze a model that is not sharded yet, and add adapters to its linear layers, in place.

    Args:
        target_modules: last components of the names of layers ("q_proj"); empty, or "all-linear",
            for every linear layer except the output layer. A vision tower gets none.
        dtype: of compute, which frozen parameters are cast to.
        seed: of the adapters' initialisation; it must be the same on every rank, since each shards
            the adapter that it initialised.

    Raises:
        ModelError: peft is not installed, or the model has no such layer.
    """
    config = lora_config(adapter, chosen_layers(model, target_modules))
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    if adapter.has_scores:
        model.get_submodule(HEAD).requires_grad_(True)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else dtype)


def chosen_layers(model: PreTrainedModel, wanted: Sequence[str]) -> list[str]:
    """Return the requested names of linear layers, or all of them, sorted.

    The output layer is excluded: its logprobs are computed from its weight alone. Of a vision model
    they are the complete names of layers of its text model.

    Raises:
        ModelError: the model has no linear layer of a requested name, or none at all.
    """
    wanted = [] if ALL_LINEAR in wanted else wanted
    heads = {output_layer(model), score_head(model) if is_score_model(model) else None}
    is_vision = vision_family(model) is not None
    inside = set((text_model(model) if is_vision else model).modules()) - heads
    layers = [
        name for name, module in model.named_modules() if type(module) is nn.Linear and module in inside
    ]
    existing = {name.rpartition(".")[2] for name in layers}
    if not existing or (unknown := set(wanted) - existing):
        missing = f"no linear layer called {', '.join(sorted(unknown))}" if existing else "no linear layer"
        raise ModelError(
            f"{type(model).__name__} has {missing} for an adapter (actor.target_modules): "
            f"it has {', '.join(sorted(existing)) or 'none'}; "
            "the output layer, embeddings and fused experts get none"
        )
    names = set(wanted) or existing
    return sorted(name for name in layers if name.rpartition(".")[2] in names) if is_vision else sorted(names)


def count_adapters(model: PreTrainedModel, rank: int, target_modules: Sequence[str]) -> int:
    """Return the number of elements that `add_adapters` would train. It raises likewise."""
    names = chosen_layers(model, target_modules)
    layers = [
        cast(nn.Linear, module)
        for name, module in model.named_modules()
        if {name, name.rpartition(".")[2]} & set(names)
    ]
    head = score_head(model).weight.numel() if is_score_model(model) else 0
    return head + sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def lora_config(adapter: Adapter, target_modules: Sequence[str]) -> "LoraConfig":
    """Return peft's config of the adapter. Raises `ModelError` if peft is not installed."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ModelError(
            f"actor.use_lora needs the package peft ({error}): pip install 'areal-debug[lora]'"
        ) from error
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(target_modules),
        bias="none",
        task_type="SEQ_CLS" if adapter.has_scores else "CAUSAL_LM",
        base_model_name_or_path=adapter.base_model,
        inference_mode=False,
    )


def write_adapter(folder: str | Path, tensors: Iterable[tuple[str, Tensor]], adapter: Adapter) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, for peft or a server to load.

    Args:
        tensors: of `AdapterTensors`.
    """
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors}
    target_modules = sorted({name.split(".")[-3] for name in on_cpu if name.endswith(".lora_A.weight")})
    config = lora_config(adapter, target_modules)
    # Not earlier: peft duplicates a head that is named here when it adds adapters.
    config.modules_to_save = [HEAD] if adapter.has_scores else None
    config.save_pretrained(str(folder))
    save_file(on_cpu, Path(folder) / TENSORS_FILE, metadata={"format": "pt"})


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters in the body, where the model is bitwise identical to the base model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # Not peft's `enable_adapters`: that also freezes the adapters, and FSDP keeps the
    # `requires_grad` of its first forward.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
