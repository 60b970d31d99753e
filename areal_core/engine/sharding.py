"""A model divided among the ranks, by FSDP2 with float32 master weights.

With `from_rank_0` only rank 0 reads the weights, and the other ranks build the model on "meta":

rank 0      reads the model       -- broadcast of a layer --> FSDP keeps this rank's shard -- the next layer -->
the others  build it on "meta"    <- receive the full layer   FSDP keeps this rank's shard    free the rest

So no other rank ever has more than its shards and one layer in memory. The shards are the same as
if each rank had read the model.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from areal_core.engine.logits import output_layer, transformer
from areal_core.engine.logprobs import score_next_tokens
from areal_core.engine.model import compile_layers
from areal_core.engine.ranks import Ranks
from areal_core.engine.reduction import set_reduction
from areal_core.engine.sequence_parallel import check_heads
from areal_core.engine.tensor_parallel import split_over_ranks, vocabulary_shard
from areal_core.engine.vision_models import choose_frequencies_by_row, hook_forward, text_model, vision_family
from areal_core.errors import ModelError


def shard_model(
    model: PreTrainedModel,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    grad_reduce_dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    layer_classes: tuple[str, ...] | None = None,
    compiles: bool = False,
    offloads: bool = False,
    from_rank_0: bool = False,
    shard_size: int | None = None,
) -> PreTrainedModel:
    """Split layers by tensor parallelism, then shard them over the other ranks.

    FSDP2 shards over the data- and sequence-parallel ranks. Each layer is a group of parameters of
    its own for FSDP2, and the rest is one group. The forward of a model with an output layer
    becomes that of `score_next_tokens`.

    Args:
        dtype: of compute; parameters keep their own dtype.
        grad_reduce_dtype: of the gradient reduction over ranks.
        layer_classes: class names of the layers; by default those that the model forbids to split,
            or else its longest list of modules.
        compiles: run layers through torch.compile.
        offloads: keep shards in host memory; a layer is on the device while it computes.
        from_rank_0: only rank 0 has weights; the model of the other ranks may be on "meta".
        shard_size: ranks that share one copy of the weights; None for all.

    Raises:
        ModelError: no module of the model has one of the class names; its logits are not supported;
            tensor parallelism cannot split it, or is combined with compilation.
        RanksError: the ranks of a group cannot share its attention heads, or ranks do not divide
            into groups of `shard_size`.
    """
    if compiles and ranks.tensor_parallel_size > 1:
        raise ModelError(
            f"fsdp.compile is true with t{ranks.tensor_parallel_size} in the allocation, which is not "
            f"supported: set it to false, or use t1"
        )
    if (head := output_layer(model)) is not None:
        is_split = ranks.tensor_parallel_size > 1
        score_next_tokens(model, vocabulary_shard(head, ranks.tensor_mesh) if is_split else None)
    if vision_family(model) is None:
        choose_frequencies_by_row(transformer(model) if head is not None else model.base_model)
    else:
        hook_forward(model)
    if from_rank_0:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = _broadcast(buffer, ranks)
    cast_saved_buffers(model, dtype)
    check_heads(model.config, ranks.sequence_parallel_size, ranks.tensor_parallel_size)
    if ranks.tensor_parallel_size > 1:
        # Tensor-parallel shards are cut from full layers, all of them before FSDP shards the first.
        if from_rank_0:
            broadcast_parameters(model, ranks)
        split_over_ranks(model, ranks.tensor_mesh)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = _find_layers(model, layer_classes)
    if compiles:
        is_text = set(model.modules() if vision_family(model) is None else text_model(model).modules())
        compile_layers(model, [layer for layer in layers if layer in is_text])
    # Inputs of layers keep their dtype: some families compute rotary embeddings in float32 (OLMo).
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=grad_reduce_dtype, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if offloads else OffloadPolicy()
    mesh = ranks.shard_mesh if shard_size is None else ranks.replicated_shards(shard_size)
    for part in (*layers, model):
        if from_rank_0:
            broadcast_parameters(part, ranks)
        fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload)
        set_reduction(part, ranks.fixed_order)
    return model


def _find_layers(model: PreTrainedModel, classes: tuple[str, ...] | None) -> list[nn.Module]:
    wanted = classes or tuple(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in wanted]
    if not classes:
        stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        # SigLIP also forbids to split its embeddings and its pooling, which are no layers.
        stacked = {layer for stack in stacks for layer in stack}
        layers = [layer for layer in layers if layer in stacked] or list(max(stacks, key=len, default=[]))
    if not layers:
        raise ModelError(
            f"no layer of {type(model).__name__} has a class in {list(wanted)}: "
            f"name its layers in actor.fsdp.wrap_policy.transformer_layer_cls_to_wrap"
        )
    inner = {part for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if layer not in inner]  # a class may name layers and their parts


def cast_saved_buffers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast buffers of a checkpoint to the dtype of compute, as Transformers does with parameters.

    Not those that the class keeps in float32, nor those that it computes itself.
    """
    kept = model._keep_in_fp32_modules_strict or ()
    saved = model.state_dict().keys()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full_name = f"{path}.{name}"
            if buffer.is_floating_point() and full_name in saved and not any(k in full_name for k in kept):
                module._buffers[name] = buffer.to(dtype)


def broadcast_parameters(module: nn.Module, ranks: Ranks) -> None:
    """Copy rank 0's parameters that are not sharded yet to every rank's device; a collective."""
    received: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                continue
            if parameter not in received:
                full = _broadcast(parameter.detach(), ranks)
                received[parameter] = nn.Parameter(full, requires_grad=parameter.requires_grad)
            part.register_parameter(name, received[parameter])


def _broadcast(tensor: Tensor, ranks: Ranks) -> Tensor:
    is_here = ranks.rank == 0
    shape, dtype = tensor.shape, tensor.dtype
    full = tensor.to(ranks.device) if is_here else torch.empty(shape, dtype=dtype, device=ranks.device)
    dist.broadcast(full.contiguous(), src=0)
    return full


def fsdp_module(model: nn.Module) -> FSDPModule:
    """Return a model that went through `shard_model`, typed as what it has become."""
    assert isinstance(model, FSDPModule)
    return model


def mesh_coordinates(tensor: DTensor) -> tuple[int, ...]:
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    return tuple(coordinates)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that this rank has a shard of; a collective of the ranks of its mesh."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for dimension in range(len(placements) - 1):  # one at a time: torch warns about several at once
        placements[dimension] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()
