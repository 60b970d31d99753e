"""A model divided among the ranks, by FSDP2 with float32 master weights."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from areal_core.engine.errors import ModelError
from areal_core.engine.logprobs import take_labels_in_output_layer
from areal_core.engine.ranks import Ranks


def shard_model(
    model: PreTrainedModel,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    grad_reduce_dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    layer_classes: tuple[str, ...] | None = None,
) -> PreTrainedModel:
    """Shard every transformer layer, then the rest, over the data- and sequence-parallel ranks.

    Args:
        dtype: of compute; parameters stay in their own dtype.
        grad_reduce_dtype: of the gradient sum over ranks.
        layer_classes: class names of the layers; by default those that the model forbids to split.

    Raises:
        ModelError: no module of the model has one of the class names.
    """
    if model.get_output_embeddings() is not None:  # a reward model has none
        take_labels_in_output_layer(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=grad_reduce_dtype, cast_forward_inputs=True)
    wanted = layer_classes or tuple(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in wanted]
    if not layers:
        raise ModelError(
            f"no layer of {type(model).__name__} has a class in {list(wanted)}: "
            f"name its layers in actor.fsdp.wrap_policy.transformer_layer_cls_to_wrap"
        )
    model.to(ranks.device.type)
    mesh = ranks.shard_mesh
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
