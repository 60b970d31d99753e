"""Tensor parallelism: the ranks of a group have the same tokens, and each a shard of every layer.

```
hidden, the same on every rank
  |-- self_attn, mlp:  columns of q k v gate up -> heads and features of this rank -> rows of o down --sum--> hidden
  |-- experts:         those of this rank, on all tokens routed to them -----------------------------sum--> hidden
  |-- norms, router:   the same on every rank
embed_tokens, lm_head: rows of the vocabulary of this rank
```

Parameters are DTensors over the group, so that FSDP2 can shard them further and full tensors can be
gathered; modules compute on the local shard, in plain tensors. Forward sums hidden states where
rows end (`SumOutput`), backward sums their gradients where columns begin (`SumGradient`): the two
functions of Megatron-LM (Shoeybi et al. 2019, section 3).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from transformers import PretrainedConfig, PreTrainedModel

from areal_core.engine.logprobs import VocabularyShard
from areal_core.errors import ModelError

# Measured: benchmarks/model_families.py compares log-probs and gradients of each with Transformers.
FAMILIES = (
    *(
        "arcee",
        "cohere2",
        "cwm",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "helium",
    ),
    *("hyperclovax", "llama", "ministral", "ministral3", "mistral", "olmo", "qwen2", "qwen3", "qwen3_moe"),
    *("seed_oss", "smollm3"),
)
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")
EMBEDDING, OUTPUT, EXPERTS = "embed_tokens", "lm_head", "experts"
# The same on every rank, but applied to this rank's heads: their gradients are partial sums.
HEAD_NORMS = ("q_norm", "k_norm")


def check_tensor_parallel(config: PretrainedConfig, size: int) -> None:
    """Raise unless a model of this config can be split over `size` ranks.

    Raises:
        ModelError: its family is not supported, or `size` does not divide its dimensions.
    """
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"tensor parallelism does not support {config.model_type!r} models, only {', '.join(FAMILIES)}: "
            f"leave t{size} out of the allocation and use more d, or c for long sequences"
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
                f"use a t in the allocation that divides {count}"
            )


def split_over_ranks(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Leave each rank its shard of every layer; call it before FSDP shards the model.

    Args:
        model: with the same weights on every rank, and the forward of `score_next_tokens`.
        mesh: the one-dimensional mesh of the group.

    Raises:
        ModelError: as in `check_tensor_parallel`, or a layer to be split has an adapter.
    """
    check_tensor_parallel(model.config, mesh.size())
    divided: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for path, module in list(model.named_modules()):
        name = path.rpartition(".")[2]
        if name in (*COLUMNS, *ROWS) and not isinstance(module, nn.Linear):
            raise ModelError(
                f"tensor parallelism cannot split {path}, which is not a plain linear layer but "
                f"{type(module).__name__}: leave t{mesh.size()} out of the allocation to train adapters"
            )
        if any(child in COLUMNS for child, _ in module.named_children()):
            module.register_forward_pre_hook(_sum_gradient_of_input(mesh.get_group()), with_kwargs=True)
        if module._parameters:
            _compute_on_shards(module, name, mesh)
            _divide_parameters(module, name, mesh, divided)


def _divide_parameters(
    module: nn.Module, name: str, mesh: DeviceMesh, divided: dict[nn.Parameter, nn.Parameter]
) -> None:
    for kind, parameter in list(module.named_parameters(recurse=False)):
        if parameter not in divided:
            placements = [placement_of(name, parameter.ndim)]
            shard = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            divided[parameter] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        module.register_parameter(kind, divided[parameter])


def placement_of(module_name: str, ndim: int) -> Placement:
    """Return the placement of a parameter; `module_name` is the last component of the path."""
    if module_name in (*COLUMNS, EMBEDDING, OUTPUT, EXPERTS):
        return Shard(0)
    # The bias of a row-parallel layer is replicated: it is added once, after the sum.
    return Shard(1) if module_name in ROWS and ndim == 2 else Replicate()


def vocabulary_shard(output_layer: nn.Module, mesh: DeviceMesh) -> VocabularyShard:
    """Return the rows of an output layer, not split yet, that this rank will have."""
    num_rows = cast(nn.Linear, output_layer).weight.shape[0]
    return VocabularyShard(_first_row(num_rows, mesh), mesh.get_group())


def whole_vocabulary(output_layer: nn.Module, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Return the forward of a split output layer that gathers the logits of all tokens."""

    def compute(features: Tensor) -> Tensor:
        with _plain_parameters(output_layer, None):
            local = nn.functional.linear(features, cast(Tensor, output_layer.weight))
        num_rows = cast(nn.Linear, output_layer).out_features
        missing = _shard_size(num_rows, mesh) - local.shape[-1]  # of the last shards
        local = nn.functional.pad(local, (0, missing)).contiguous()
        shards = [torch.empty_like(local) for _ in range(mesh.size())]
        dist.all_gather(shards, local, group=mesh.get_group())
        return torch.cat(shards, dim=-1)[..., :num_rows]

    return compute


def _compute_on_shards(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Make the module compute on plain tensors; its input and output are the same on every rank."""
    compute = module.forward
    gradient = [Partial()] if name in HEAD_NORMS else None  # None: as the parameter itself
    if name in ROWS:
        compute = _rows(cast(nn.Linear, module), mesh.get_group())
    elif name == EMBEDDING:
        compute = _embedding(cast(nn.Embedding, module), mesh)
    elif name == EXPERTS:
        compute = _experts(module, mesh)

    def forward(self: nn.Module, *args: Any) -> Tensor:
        with _plain_parameters(self, gradient):
            return compute(*args)

    module.forward = MethodType(forward, module)


@contextmanager
def _plain_parameters(module: nn.Module, gradient: Sequence[Placement] | None) -> Iterator[None]:
    sharded = dict(module._parameters)
    for name, parameter in sharded.items():
        if parameter is not None:
            local = cast(DTensor, parameter).to_local(grad_placements=gradient)
            module._parameters[name] = cast(nn.Parameter, local)  # in name: any tensor works
    try:
        yield
    finally:
        module._parameters.update(sharded)


def _rows(linear: nn.Linear, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def compute(features: Tensor) -> Tensor:
        hidden = SumOutput.apply(nn.functional.linear(features, linear.weight), group)
        return hidden if linear.bias is None else hidden + linear.bias

    return compute


def _embedding(embedding: nn.Embedding, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    look_up, group = embedding.forward, mesh.get_group()
    first = _first_row(embedding.num_embeddings, mesh)
    if embedding.padding_idx is not None:  # on the rank that has its row, the row gets no gradient
        is_here = 0 <= embedding.padding_idx - first < _shard_size(embedding.num_embeddings, mesh)
        embedding.padding_idx = embedding.padding_idx - first if is_here else None

    def compute(input_ids: Tensor) -> Tensor:
        rows = input_ids - first
        elsewhere = (rows < 0) | (rows >= embedding.weight.shape[0])
        hidden = look_up(rows.masked_fill(elsewhere, 0))
        return SumOutput.apply(hidden.masked_fill(elsewhere[..., None], 0.0), group)

    return compute


def _experts(experts: Any, mesh: DeviceMesh) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    run_experts, group = experts.forward, mesh.get_group()
    experts.num_experts //= mesh.size()
    first = mesh.get_local_rank() * experts.num_experts
    experts._is_expert_parallel = True  # Transformers then skips tokens of an expert numbered `num_experts`

    def compute(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        local = chosen - first
        local = local.masked_fill((local < 0) | (local >= experts.num_experts), experts.num_experts)
        partial_sum = run_experts(SumGradient.apply(hidden, group), local, SumGradient.apply(weights, group))
        return SumOutput.apply(partial_sum, group)

    return compute


def _shard_size(count: int, mesh: DeviceMesh) -> int:
    """Return the rows of each shard, as DTensor divides them; the last shards may be smaller."""
    return -(-count // mesh.size())


def _first_row(count: int, mesh: DeviceMesh) -> int:
    return mesh.get_local_rank() * _shard_size(count, mesh)


Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _sum_gradient_of_input(
    group: dist.ProcessGroup,
) -> Callable[[nn.Module, Args, Kwargs], tuple[Args, Kwargs]]:
    def hook(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if args:
            return (SumGradient.apply(args[0], group), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": SumGradient.apply(kwargs["hidden_states"], group)}

    return hook


class SumOutput(torch.autograd.Function):
    """Sum a tensor over the group, in place; the gradient passes to each term unchanged."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(term)
        dist.all_reduce(term, group=group)
        return term

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class SumGradient(torch.autograd.Function):
    """Return the tensor itself; its gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
