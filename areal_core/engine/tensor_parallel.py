"""Tensor parallelism: the ranks of a group hold the same tokens, and each a part of every layer.

```
hidden, the same on every rank
  |-- self_attn, mlp:  columns of q k v gate up -> heads and features of this rank -> rows of o down --sum--> hidden
  |-- experts:         those of this rank, on all tokens routed to them -----------------------------sum--> hidden
  |-- norms, router:   the same on every rank
embed_tokens, lm_head: rows of the vocabulary of this rank
```

Parameters are DTensors over the group, so that FSDP2 can shard them further and every whole tensor can be had; modules compute on
the part that is here, in plain tensors. Forward sums hidden states where rows end (`SumOutput`), backward sums their gradients where
columns begin (`SumGradient`): the two functions of Megatron-LM (Shoeybi et al. 2019, section 3).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from transformers import PretrainedConfig, PreTrainedModel

from areal_core.engine.errors import ModelError
from areal_core.engine.logprobs import VocabularyPart

FAMILIES = ("gemma3_text", "llama", "qwen2", "qwen3", "qwen3_moe")
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")
EMBEDDING, OUTPUT, EXPERTS = "embed_tokens", "lm_head", "experts"
# The same on every rank, but applied to this rank's heads: their gradients are parts of a sum.
HEAD_NORMS = ("q_norm", "k_norm")


def check_tensor_parallel(config: PretrainedConfig, size: int) -> None:
    """Raise unless a model of this config can be split over `size` ranks.

    Raises:
        ModelError: its family has no plan, or `size` does not divide what is split.
    """
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"tensor parallelism has no plan for {config.model_type!r} models, only for {', '.join(FAMILIES)}: "
            f"leave t{size} out of the allocation and take more d, or c for long sequences"
        )
    divided = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "MLP features": config.intermediate_size,
    }
    if config.model_type == "qwen3_moe":
        divided["experts"] = config.num_experts
    for name, count in divided.items():
        if count % size:
            raise ModelError(
                f"the model has {count} {name}, which do not divide among {size} tensor-parallel ranks: "
                f"give the allocation a t that divides {count}"
            )


def split_over_ranks(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Leave each rank its part of every layer; before FSDP shards the model.

    Args:
        model: with the same weights on every rank, and an output layer that takes labels (`take_labels_in_output_layer`).
        mesh: the one-dimensional mesh of the group.

    Raises:
        ModelError: as of `check_tensor_parallel`, or a layer to be split has an adapter.
    """
    check_tensor_parallel(model.config, mesh.size())
    divided: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for path, module in list(model.named_modules()):
        name = path.rpartition(".")[2]
        if name in (*COLUMNS, *ROWS) and not isinstance(module, nn.Linear):
            raise ModelError(
                f"tensor parallelism cannot split {path}, which is no plain linear layer but {type(module).__name__}: "
                f"leave t{mesh.size()} out of the allocation to train adapters"
            )
        if any(child in COLUMNS for child, _ in module.named_children()):
            module.register_forward_pre_hook(_sum_gradient_of_input(mesh.get_group()), with_kwargs=True)
        if module._parameters:
            _compute_on_parts(module, name, mesh)
            _divide_parameters(module, name, mesh, divided)


def _divide_parameters(
    module: nn.Module, name: str, mesh: DeviceMesh, divided: dict[nn.Parameter, nn.Parameter]
) -> None:
    for kind, parameter in list(module.named_parameters(recurse=False)):
        if parameter not in divided:
            placements = [placement_of(name, parameter.ndim)]
            part = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            divided[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        module.register_parameter(kind, divided[parameter])


def placement_of(module_name: str, ndim: int) -> Placement:
    """How a parameter of a module, by the last part of its name, is divided."""
    if module_name in (*COLUMNS, EMBEDDING, OUTPUT, EXPERTS):
        return Shard(0)
    # The bias of rows is whole: it is added once, after the sum.
    return Shard(1) if module_name in ROWS and ndim == 2 else Replicate()


def _compute_on_parts(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Make the module's forward see plain tensors, and take and give hidden states that are the same on every rank."""
    compute = module.forward
    gradient = [Partial()] if name in HEAD_NORMS else None  # None: as the parameter itself
    if name in ROWS:
        compute = _rows(module, mesh.get_group())
    elif name == EMBEDDING:
        compute = _embedding(module, mesh)
    elif name == EXPERTS:
        compute = _experts(module, mesh)
    elif name == OUTPUT:
        module.vocabulary_part = VocabularyPart(_first_row(module.out_features, mesh), mesh.get_group())

    def forward(self: nn.Module, *args: Tensor) -> Tensor:
        with _plain_parameters(self, gradient):
            return compute(*args)

    module.forward = MethodType(forward, module)


@contextmanager
def _plain_parameters(module: nn.Module, gradient: list[Placement] | None) -> Iterator[None]:
    """The module's parameters as plain tensors of this rank's part."""
    whole = dict(module._parameters)
    for name, parameter in whole.items():
        if parameter is not None:
            module._parameters[name] = parameter.to_local(grad_placements=gradient)
    try:
        yield
    finally:
        module._parameters.update(whole)


def _rows(linear: nn.Linear, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def compute(features: Tensor) -> Tensor:
        hidden = SumOutput.apply(nn.functional.linear(features, linear.weight), group)
        return hidden if linear.bias is None else hidden + linear.bias

    return compute


def _embedding(embedding: nn.Embedding, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    look_up, group = embedding.forward, mesh.get_group()
    first = _first_row(embedding.num_embeddings, mesh)
    if embedding.padding_idx is not None:  # its row gets no gradient, on the rank that has it
        is_here = 0 <= embedding.padding_idx - first < _part_size(embedding.num_embeddings, mesh)
        embedding.padding_idx = embedding.padding_idx - first if is_here else None

    def compute(input_ids: Tensor) -> Tensor:
        rows = input_ids - first
        elsewhere = (rows < 0) | (rows >= embedding.weight.shape[0])
        hidden = look_up(rows.masked_fill(elsewhere, 0))
        return SumOutput.apply(hidden.masked_fill(elsewhere[..., None], 0.0), group)

    return compute


def _experts(experts: nn.Module, mesh: DeviceMesh) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    whole, group = experts.forward, mesh.get_group()
    experts.num_experts //= mesh.size()
    first = mesh.get_local_rank() * experts.num_experts
    experts._is_expert_parallel = True  # Transformers then skips tokens of an expert numbered `num_experts`

    def compute(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        local = chosen - first
        local = local.masked_fill((local < 0) | (local >= experts.num_experts), experts.num_experts)
        mine = whole(SumGradient.apply(hidden, group), local, SumGradient.apply(weights, group))
        return SumOutput.apply(mine, group)

    return compute


def _part_size(count: int, mesh: DeviceMesh) -> int:
    """Rows of each part, as DTensor divides them; the last parts are smaller where the ranks do not divide `count`."""
    return -(-count // mesh.size())


def _first_row(count: int, mesh: DeviceMesh) -> int:
    return mesh.get_local_rank() * _part_size(count, mesh)


def _sum_gradient_of_input(group: dist.ProcessGroup) -> Callable[..., tuple[tuple, dict]]:
    """Several layers read the same hidden states: once for all of them, their gradient is summed where it enters the block."""

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (SumGradient.apply(args[0], group), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": SumGradient.apply(kwargs["hidden_states"], group)}

    return hook


class SumOutput(torch.autograd.Function):
    """The sum of a tensor over the group, in place; its gradient is that of each part."""

    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(part)
        dist.all_reduce(part, group=group)
        return part

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class SumGradient(torch.autograd.Function):
    """The tensor itself, whose gradient is the sum over the group."""

    @staticmethod
    def forward(ctx, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
