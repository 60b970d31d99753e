"""A model divided among the ranks, by FSDP2 with float32 master weights."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from areal_core.engine.compile import compile_layers
from areal_core.engine.errors import ModelError
from areal_core.engine.loading import take_buffers_from_rank_0, take_parameters_from_rank_0
from areal_core.engine.logprobs import take_labels_in_output_layer
from areal_core.engine.ranks import Ranks
from areal_core.engine.sequence_parallel import check_heads
from areal_core.engine.tensor_parallel import split_over_ranks


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
) -> PreTrainedModel:
    """Split layers over the tensor-parallel ranks; shard each layer, then the rest, over the data- and sequence-parallel ranks.

    Args:
        dtype: of compute; parameters stay in their own dtype.
        grad_reduce_dtype: of the gradient sum over ranks.
        layer_classes: class names of the layers; by default those that the model forbids to split.
        compiles: layers go through torch.compile.
        offloads: shards stay in host memory; a layer is on the device while it computes.
        from_rank_0: only rank 0 has weights; the other ranks' model may be on "meta".

    Raises:
        ModelError: no module of the model has one of the class names, or tensor parallelism cannot split it or is to be compiled.
        RanksError: the ranks of a group cannot share its attention heads.
    """
    if compiles and ranks.tensor_parallel_size > 1:
        raise ModelError(
            f"fsdp.compile is true with t{ranks.tensor_parallel_size} in the allocation, which is not built: set it to false, or use t1"
        )
    if model.get_output_embeddings() is not None:  # a reward model has none
        take_labels_in_output_layer(model)
    if from_rank_0:
        take_buffers_from_rank_0(model, ranks)
    check_heads(model.config, ranks.sequence_parallel_size, ranks.tensor_parallel_size)
    if ranks.tensor_parallel_size > 1:
        if from_rank_0:  # its parts are cut from whole layers, all of them before the first is sharded
            take_parameters_from_rank_0(model, ranks)
        split_over_ranks(model, ranks.tensor_mesh)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = _find_layers(model, layer_classes)
    if compiles:
        compile_layers(model, layers)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=grad_reduce_dtype, cast_forward_inputs=True)
    offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if offloads else OffloadPolicy()
    for part in (*layers, model):
        if from_rank_0:
            take_parameters_from_rank_0(part, ranks)
        fully_shard(part, mesh=ranks.shard_mesh, mp_policy=policy, offload_policy=offload)
    return model


def _find_layers(model: PreTrainedModel, classes: tuple[str, ...] | None) -> list[nn.Module]:
    wanted = classes or tuple(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in wanted]
    if not layers:
        raise ModelError(
            f"no layer of {type(model).__name__} has a class in {list(wanted)}: "
            f"name its layers in actor.fsdp.wrap_policy.transformer_layer_cls_to_wrap"
        )
    return layers


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that this rank has a shard of; a collective of the ranks that have the others."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for dimension in range(len(placements) - 1):  # one at a time: of several at once torch warns
        placements[dimension] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()
