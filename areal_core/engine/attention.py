"""Attention over packed sequences without a mask of `[tokens, tokens]`: each sequence attends to itself alone.

Sequences of one micro-batch lie one after another in `[1, heads, tokens, head_dim]`. Splitting that by length and attending to each
piece costs what the pieces cost, on any device; flash-attention does the same in one kernel where it is installed.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED = "packed_sdpa"


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    sequence_lengths: list[int],
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention inside each packed sequence.

    Args:
        query: [1, heads, tokens, head_dim]. key, value: [1, kv_heads, tokens, head_dim].
        attention_mask: None; the lengths say everything.
        sequence_lengths: tokens of each sequence, in packed order; their sum is `tokens`.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it.

    Returns:
        [1, tokens, heads, head_dim], and None for the attention weights that Transformers' interface wants.
    """
    # split, not slices: the backward of a split is one concatenation, that of n slices is n zero-filled copies.
    pieces = zip(*(t.split(sequence_lengths, dim=2) for t in (query, key, value)), strict=True)
    attended = [
        scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=(window := _window_mask(q.shape[2], sliding_window, q.device)),
            is_causal=window is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=True,
        )
        for q, k, v in pieces
    ]
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous(), None


def _window_mask(length: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """True where a token may look, [length, length]; None when the window never ends inside the sequence."""
    if sliding_window is None or length <= sliding_window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < sliding_window)


# Transformers makes no mask for an attention function whose name has no mask function, which is what packing wants.
AttentionInterface.register(PACKED, packed_attention)
