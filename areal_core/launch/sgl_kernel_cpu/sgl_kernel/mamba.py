"""Gated delta networks (linear attention of Qwen3-Next and Qwen3.5) in torch, token by token.

SGLang imports these names from `sgl_kernel.mamba`; two more are in `torch.ops.sgl_kernel`. States
are rows of SGLang's pools, read and written in place at the slots of the requests:

    convolution  [slots, dim, width - 1]     the last inputs
    recurrent    [slots, heads, value, key]  S; S' = exp(g) S, S = S' + beta (v - S' k) k^T, o = S q
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d_fn_cpu(
    mixed_qkv_transposed: Tensor,
    conv_weights: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: object,
) -> Tensor:
    """Convolve packed prompts [dim, tokens] with `conv_weights` [dim, width]."""
    outputs = []
    bounds = query_start_loc.tolist()
    for row, slot in enumerate(cache_indices.tolist()):
        new = mixed_qkv_transposed[:, bounds[row] : bounds[row + 1]]
        before = conv_states[slot] * bool(has_initial_state[row])
        outputs.append(convolved(before, new, conv_weights, bias, conv_states, slot))
    output = torch.cat(outputs, 1)
    return F.silu(output) if activation == "silu" else output


def causal_conv1d_update_cpu(
    mixed_qkv: Tensor,
    conv_states: Tensor,
    conv_weights: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor,
) -> Tensor:
    """Convolve one new token of each request, [requests, dim]."""
    outputs = [
        convolved(conv_states[slot], new[:, None], conv_weights, bias, conv_states, slot)
        for new, slot in zip(mixed_qkv, conv_state_indices.tolist(), strict=True)
    ]
    output = torch.cat(outputs, 1).T
    return F.silu(output) if activation == "silu" else output


def convolved(
    before: Tensor, new: Tensor, weights: Tensor, bias: Tensor | None, states: Tensor, slot: int
) -> Tensor:
    """Convolve `new` [dim, tokens] after `before` [dim, width - 1], and store the last inputs."""
    inputs = torch.cat([before.to(new.dtype), new], 1)
    output = F.conv1d(inputs[None], weights[:, None], bias, groups=len(weights))[0]
    states[slot] = inputs[:, inputs.shape[1] - states.shape[2] :]
    return output


def fused_gdn_gating_cpu(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """Return log decay g and write strength beta of `a`, `b` [tokens, heads], float32 [1, ...]."""
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float(), beta, threshold)
    return g[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor,
) -> tuple[Tensor, Tensor, None]:
    """Apply the rule to packed q, k [1, tokens, key heads, key] and v [1, tokens, heads, value].

    Returns:
        The output, as v; the pool of states, written in place; None for states inside prompts.
    """
    if head_first or not use_qk_l2norm_in_kernel:
        raise NotImplementedError("only tokens first, and keys normalised here, as SGLang 0.5.23 calls it")
    output, bounds = torch.empty_like(v), cu_seqlens.tolist()
    for row, slot in enumerate(initial_state_indices.tolist()):
        at = slice(bounds[row], bounds[row + 1])
        output[0, at] = recurrent(q[0, at], k[0, at], v[0, at], g[0, at], beta[0, at], initial_state, slot)
    return output, initial_state, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias, softplus_beta, softplus_threshold)
    arguments = (initial_state_source, cu_seqlens, False, use_qk_l2norm_in_kernel, initial_state_indices)
    return chunk_gated_delta_rule_cpu(q, k, v, g, beta, *arguments)[0]


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slot: int) -> Tensor:
    """Apply the rule to the tokens of one request, from and to its slot; no batch dimension."""
    repeats = v.shape[1] // k.shape[1]
    q, k = (
        (rows.float() * torch.rsqrt(rows.float().square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(
            repeats, 1
        )
        for rows in (q, k)
    )
    q = q * q.shape[-1] ** -0.5
    state, outputs = states[slot].float(), []  # [heads, value, key]
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        written = beta[t][:, None] * (v[t].float() - (state @ k[t][..., None])[..., 0])
        state = state + written[..., None] * k[t][:, None]
        outputs.append((state @ q[t][..., None])[..., 0])
    states[slot] = state.to(states.dtype)
    return torch.stack(outputs).to(v.dtype)
