"""Fused kernels of the package liger-kernel for norms and gated MLPs: optional, only on a GPU.

Results differ in the last bits. Rotary embeddings are not replaced: Liger would replace them for
every model in the process. Cross-entropy is computed in `logprobs.py`.
"""

import importlib.util

from transformers import PreTrainedModel

from areal_core.engine.errors import ModelError


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
