"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen model, through peft.

A linear layer W becomes W + alpha / rank * B A. Only A [rank, in] and B [out, rank] train, with float32 masters; B begins at 0, so that a
new adapter changes nothing. What is frozen has no optimizer and so needs no master: it stands in the compute dtype.

The adapters are layers of the model itself, put in before it is sharded, so that sharding, packing, gradient checkpointing and the output
layer work as ever. What is about training (optimizer, checkpoints, checksums) goes by `trained_parameters`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_core.engine.errors import ModelError
from areal_core.engine.scores import HEAD, is_score_model
from areal_core.engine.sharding import whole

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"
ADAPTER = "default"  # peft's name of the one adapter, which it leaves out of the names in files
FILE_PREFIX = "base_model.model."
TENSORS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class Adapter:
    """What an adapter is, besides its tensors.

    Args:
        base_model: path of the checkpoint that it stands on.
        has_scores: it is of a reward model or a value model, whose head is trained whole.
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
    """What an adapted model trains, whole, float32, under the names of peft's files. It may be iterated again; a collective each time."""

    model: nn.Module
    device: torch.device

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in trained_parameters(self.model).items():
            yield FILE_PREFIX + name.replace(f".{ADAPTER}.", "."), whole(parameter.detach().to(self.device))


@dataclass(frozen=True)
class MergedTensors:
    """The weights W + alpha / rank * B A under the names of the model beneath. It may be iterated again, as `weights` may.

    Args:
        weights: every tensor of the adapted model, whole and in float32, those of a layer after one another.
        dtype: that the sum is rounded to.
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
    """W [out, in] + scaling * B [out, rank] @ A [rank, in], in float32: rounded to bfloat16, most of an update would be lost twice."""
    return weight.float() + scaling * (up.float() @ down.float())


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter that is not frozen, by name: of an adapted model the adapters and a head of scores, else all."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def add_adapters(
    model: PreTrainedModel,
    adapter: Adapter,
    target_modules: Sequence[str],
    *,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Freeze a model that is not sharded yet, and put adapters on its linear layers, in place.

    Args:
        target_modules: last parts of the names of layers ("q_proj"); none, or "all-linear": every linear layer but the output layer.
        dtype: of compute, which frozen parameters are put into.
        seed: of the adapters' random numbers; the same on every rank, or each would shard an adapter of its own.

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
    """The wanted names of linear layers, or all that there are, sorted. The output layer is none: it is computed without its module."""
    wanted = [] if ALL_LINEAR in wanted else wanted
    heads = {model.get_output_embeddings(), model.get_submodule(HEAD) if is_score_model(model) else None}
    layers = [
        name for name, module in model.named_modules() if type(module) is nn.Linear and module not in heads
    ]
    there = {name.rpartition(".")[2] for name in layers}
    if not there or (unknown := set(wanted) - there):
        missing = f"no linear layer called {', '.join(sorted(unknown))}" if there else "no linear layer"
        raise ModelError(
            f"{type(model).__name__} has {missing} for an adapter (actor.target_modules): it has {', '.join(sorted(there)) or 'none'}; "
            "the output layer, embeddings and fused experts get none"
        )
    return sorted(set(wanted) or there)


def count_adapters(model: PreTrainedModel, rank: int, target_modules: Sequence[str]) -> int:
    """Elements that `add_adapters` would train of a model, a head of scores included. Raises `ModelError` as that does."""
    names = chosen_layers(model, target_modules)
    layers = [module for name, module in model.named_modules() if name.rpartition(".")[2] in names]
    head = model.get_submodule(HEAD).weight.numel() if is_score_model(model) else 0
    return head + sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def lora_config(adapter: Adapter, target_modules: Sequence[str]) -> "LoraConfig":
    """The adapter in peft's words. Raises `ModelError` where peft is not installed."""
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
    """Write `adapter_config.json` and `adapter_model.safetensors`, as `AdapterTensors` gives them, for peft or a server to load."""
    held = {name: tensor.cpu().contiguous() for name, tensor in tensors}
    target_modules = sorted({name.split(".")[-3] for name in held if name.endswith(".lora_A.weight")})
    config = lora_config(adapter, target_modules)
    # Not before: of a head named here peft makes two when it puts adapters in.
    config.modules_to_save = [HEAD] if adapter.has_scores else None
    config.save_pretrained(str(folder))
    save_file(held, Path(folder) / TENSORS_FILE, metadata={"format": "pt"})


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model beneath, bit for bit, for the time of the body."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # Not peft's `enable_adapters`: that also freezes the adapters, and FSDP takes what it sees at its first forward for good.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
