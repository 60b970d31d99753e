"""Operators that SGLang's model files read from `torch.ops.sgl_kernel` while they are imported.

`sglang.srt.models.qwen3_5` is imported by the image processor of all Qwen-VL models, so without
them no Qwen-VL model is served. What dense models of that family call is written in torch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .mamba import fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    x.mul_(gate.reshape(x.shape).sigmoid())


def gemma_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * (1.0 + weight.float())).to(rows.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    return (
        gemma_norm(q.reshape(-1, head_dim), q_weight, epsilon),
        gemma_norm(k.reshape(-1, head_dim), k_weight, epsilon),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    epsilon: float,
    head_dim: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Divide `q_gate` [tokens, heads * 2 * head_dim] into query and gate of each head; normalise.

    Returns:
        q and k as [tokens * heads, head_dim], gate [tokens, heads * head_dim].
    """
    q, gate = q_gate.view(-1, num_heads, 2 * head_dim).chunk(2, dim=-1)
    normed = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, epsilon, head_dim)
    return *normed, gate.reshape(len(gate), -1)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, num_key_heads: int, num_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Divide the projections of linear attention, which hold q, k, v, z and b, a one after another.

    Returns:
        q, k and v as [tokens, dim], z [tokens, heads, value_dim], b and a [tokens, heads].
    """
    size = 2 * num_key_heads * key_dim + num_heads * value_dim
    z = qkvz[:, size:].reshape(-1, num_heads, value_dim)
    return qkvz[:, :size].contiguous(), z, ba[:, :num_heads].contiguous(), ba[:, num_heads:].contiguous()


IMPLEMENTED: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        fused_sigmoid_mul_cpu,
        fused_qk_gemma_rmsnorm_cpu,
        fused_qk_gemma_rmsnorm_with_gate_cpu,
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
        fused_gdn_gating_cpu,
        fused_sigmoid_gating_delta_rule_update_cpu,
    )
}
READ_AT_IMPORT = (
    *IMPLEMENTED,
    "fused_moe_router_cpu",
    "rmsnorm_cpu",
    "fused_dual_residual_rmsnorm_cpu",
)
