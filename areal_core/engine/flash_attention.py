"""Flash-attention over packed sequences in one kernel, where the device supports it.

Elsewhere `attention.py` runs SDPA, one sequence at a time. The kernel is torch's own
(`torch.nn.attention.varlen`), so no other package is needed. Its backward is deterministic when
torch's deterministic algorithms are on.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import cast

import torch
from torch import Tensor
from transformers import AttentionInterface

from areal_core.engine.attention import PACKED, Packing, attend_each, packed_attention

FLASH = "packed_flash"
OLDEST_CAPABILITY = (8, 0)  # Ampere
WIDEST_HEAD = 256


@dataclass(frozen=True)
class AttentionChoice:
    """The attention function of a model, by its name in Transformers, and the reason for it."""

    implementation: str
    reason: str


def choose_attention(attn_impl: str, device: str, dtype: torch.dtype) -> AttentionChoice:
    """Return the attention for `attn_impl` on a device ("cpu" or "cuda") in a compute dtype."""
    if attn_impl == "sdpa":
        return AttentionChoice(PACKED, "SDPA, one sequence at a time, as attn_impl requests")
    if device != "cuda":
        missing = "no flash-attention on a CPU"
    elif dtype == torch.float32:
        missing = "flash-attention computes in bfloat16 or float16, not in float32"
    elif torch.cuda.is_available() and torch.cuda.get_device_capability() < OLDEST_CAPABILITY:
        missing = "flash-attention needs an Ampere GPU or a newer one"
    else:
        return AttentionChoice(FLASH, "torch's flash-attention over packed sequences")
    return AttentionChoice(PACKED, f"SDPA, one sequence at a time: {missing}")


def attend_all(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    """Compute `attend_each` in one kernel, if it supports the options and the head size."""
    if packing.dropout or packing.softcap is not None or query.shape[3] > WIDEST_HEAD:
        return attend_each(query, key, value, packing)
    from torch.nn.attention.varlen import varlen_attn

    ends = _cumulative(tuple(packing.sequence_lengths), query.device)
    longest = max(packing.sequence_lengths)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [tokens, heads, head_dim]
    attended = varlen_attn(
        q,
        k,
        v,
        ends,
        ends,
        longest,
        longest,
        scale=packing.scaling,
        # The kernel counts the tokens before a token, Transformers also counts the token itself.
        window_size=(-1 if packing.sliding_window is None else packing.sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return cast(Tensor, attended)[None]  # a tuple only with `return_aux`


@lru_cache(maxsize=4)  # shared by the layers of a micro-batch: the copy to the device blocks
def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


AttentionInterface.register(FLASH, partial(packed_attention, kernel=attend_all))
