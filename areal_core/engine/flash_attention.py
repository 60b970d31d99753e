"""Flash-attention over packed sequences, one kernel for all of them, where the device has it; else `attention.py`, sequence by sequence.

The kernel is torch's own (`torch.nn.attention.varlen`), so no package is needed beside it. Its backward is deterministic where torch's
deterministic algorithms are on.
"""

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor
from transformers import AttentionInterface

from areal_core.engine.attention import PACKED, Packing, attend_each, packed_attention

FLASH = "packed_flash"
OLDEST_CAPABILITY = (8, 0)  # Ampere
WIDEST_HEAD = 256


@dataclass(frozen=True)
class AttentionChoice:
    """The attention function that a model is given, by its name among Transformers', and why."""

    implementation: str
    why: str


def choose_attention(attn_impl: str, device: str, dtype: torch.dtype) -> AttentionChoice:
    """What `attn_impl` means on a device ("cpu" or "cuda") for a compute dtype."""
    if attn_impl == "sdpa":
        return AttentionChoice(PACKED, "SDPA, one sequence at a time, as attn_impl asks")
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
    """What `attend_each` computes, in one kernel; it has no dropout and no soft cap, and takes heads of up to 256."""
    if packing.dropout or packing.softcap is not None or query.shape[3] > WIDEST_HEAD:
        return attend_each(query, key, value, packing)
    from torch.nn.attention.varlen import varlen_attn

    ends = _cumulative(tuple(packing.sequence_lengths), query.device)
    longest = max(packing.sequence_lengths)
    attended = varlen_attn(
        *(t[0].transpose(0, 1) for t in (query, key, value)),  # [tokens, heads, head_dim]
        ends,
        ends,
        longest,
        longest,
        scale=packing.scaling,
        # The kernel counts the tokens before a token, Transformers counts the token itself, too.
        window_size=(-1 if packing.sliding_window is None else packing.sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[None]


@lru_cache(maxsize=4)  # every layer asks for those of its micro-batch, and a copy to the device waits for it
def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


AttentionInterface.register(FLASH, partial(packed_attention, kernel=attend_all))
