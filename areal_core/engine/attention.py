"""Attention within each packed sequence, without a mask of `[tokens, tokens]`.

The sequences of a micro-batch are concatenated in `[1, heads, tokens, head_dim]`. Three functions
of Transformers' attention interface compute them, and `choose_attention` picks one:

* `PACKED` splits that by length and runs SDPA on each piece, at the cost of the pieces, on any
  device.
* `FLASH` runs torch's own flash-attention (`torch.nn.attention.varlen`) on all of them in one
  kernel, where the device supports it; no other package is needed. Its backward is deterministic
  when torch's deterministic algorithms are on.
* `INVARIANT` (`attn_impl=batch_invariant`) computes on a CPU what the embedded engine computes when
  it samples (`attend_rows`), so that the bits of a log-prob are those of the sampled one.

The sequences may be the segments of a tree of tokens (`trees/token_tree.py`). Each then attends to
its own tokens and to those before it in its row, and to no others: `KeyBlocks`.

Why bits follow from the shape of a batch, on a CPU: products of few rows (1 to 15 with AMX, 1 to 3 on
another one), and softmax over fewer than 16 keys, add in another order than larger ones; SDPA
divides queries and keys into blocks that depend on their number, and so do products with sums over
the keys. With at least `MIN_ROWS` rows and `MIN_KEYS` keys, and sums over `KEY_TILE` keys at a time,
each row of a product and of a softmax has the same bits in any batch: `parity.py` measures that on
the machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from areal_core.engine.sequence_parallel import MIN_ROWS, exchange_heads
from areal_core.errors import ModelError

# Names in Transformers, which asks a class whether it supports SDPA if the name contains "sdpa".
PACKED, FLASH, INVARIANT = "packed_rows", "packed_flash", "packed_invariant"
MIN_KEYS = 16  # of a softmax whose bits do not depend on their number, as of `MIN_ROWS` in products
# Terms of one sum in a product: MKL divides longer ones (from 193 on one machine) into blocks whose
# size depends on their number.
KEY_TILE = 128
QUERIES_AT_A_TIME = 128  # of `INVARIANT`: their scores are materialised
OLDEST_CAPABILITY = (8, 0)  # of a GPU with flash-attention: Ampere
WIDEST_HEAD = 256  # of flash-attention


@dataclass(frozen=True)
class AttentionChoice:
    """The attention function of a model, by its name in Transformers, and the reason for it."""

    implementation: str
    reason: str


def choose_attention(attn_impl: str, device: str, dtype: torch.dtype) -> AttentionChoice:
    """Return the attention for `attn_impl` on a device ("cpu" or "cuda") in a compute dtype.

    Raises:
        ModelError: there is no such attention on the device.
    """
    if attn_impl == "batch_invariant":
        if device != "cpu":
            raise ModelError(
                f"attn_impl is 'batch_invariant' and the device is {device!r}: it has been verified on CPUs "
                f"only; set device to cpu, or attn_impl to flash_attention_2"
            )
        return AttentionChoice(INVARIANT, "the embedded engine's own attention, as attn_impl requests")
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


@dataclass(frozen=True)
class KeyBlocks:
    """Tokens that the segments of a tree attend to.

    Args:
        lengths: tokens of each block. Together the blocks are all tokens, in order.
        of_sequence: the blocks of each segment's row, in its order, up to the segment's last token.
    """

    lengths: list[int]
    of_sequence: list[list[int]]

    def num_keys(self) -> list[int]:
        return [sum(self.lengths[block] for block in path) for path in self.of_sequence]

    def padded(self, padding: int) -> "KeyBlocks":
        """Return them with padding as a separate sequence; itself without padding."""
        if not padding:
            return self
        return KeyBlocks([*self.lengths, padding], [*self.of_sequence, [len(self.lengths)]])


@dataclass(frozen=True)
class Packing:
    """The layout of packed sequences and the parameters of attention.

    Args:
        sequence_lengths: tokens of each sequence, in packed order.
        sliding_window: a token attends to itself and the `sliding_window - 1` tokens before it.
        softcap: scores are soft-capped to (-softcap, softcap), as in Gemma 2.
        sinks: per head, the score of a token without a value that every token attends to, [heads].
        image_blocks: of each sequence, the picture of each token, -1 of text, int64 [length].
            Tokens of a picture attend to each other in both directions. None: all are of text.
        key_blocks: of the segments of a tree. None: each sequence attends to itself alone.
    """

    sequence_lengths: list[int]
    scaling: float
    dropout: float = 0.0
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    image_blocks: Sequence[Tensor | None] | None = None
    key_blocks: KeyBlocks | None = None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    sequence_lengths: list[int] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    image_blocks: Sequence[Tensor | None] | None = None,
    key_blocks: KeyBlocks | None = None,
    sequence_parallel: ProcessGroup | None = None,
    kernel: Callable[..., Tensor] | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute causal attention within each packed sequence, with Transformers' interface.

    Args:
        query: [1, heads, tokens, head_dim]. key, value: [1, kv_heads, tokens, head_dim].
        attention_mask: None; the lengths determine the mask.
        sequence_lengths, scaling, dropout, sliding_window, softcap, image_blocks, key_blocks: the
            fields of `Packing`; the sum of the lengths is `tokens`. A family whose layers do not
            pass the lengths on gets attention over all tokens, as of one sequence: see `parity.py`.
        s_aux: attention sinks, [heads].
        sequence_parallel: the ranks that share the sequences; `tokens` is then this rank's slice.
        kernel: has the arguments of `attend_each`, which is the default.

    Returns:
        [1, tokens, heads, head_dim], and None in place of the attention weights.
    """
    lengths = sequence_lengths or [query.shape[2] * (sequence_parallel.size() if sequence_parallel else 1)]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if s_aux is not None and sequence_parallel is not None:
        s_aux = s_aux.chunk(sequence_parallel.size())[sequence_parallel.rank()]
    packing = Packing(lengths, scale, dropout, sliding_window, softcap, s_aux, image_blocks, key_blocks)
    attend = partial(kernel or attend_each, packing=packing)
    if sequence_parallel is None:
        return attend(query, key, value), None
    return exchange_heads(attend, query, key, value, sequence_parallel), None


def attend_each(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    """Compute attention of complete sequences, one by one.

    [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim].
    """
    queries = query.split(packing.sequence_lengths, dim=2)
    keys, values = (_split_keys(t, packing) for t in (key, value))
    blocks = packing.image_blocks or [None] * len(packing.sequence_lengths)
    attended = []
    for q, k, v, images in zip(queries, keys, values, blocks, strict=True):
        window = _window_mask(q.shape[2], k.shape[2], packing.sliding_window, images, q.device)
        if packing.softcap is None and packing.sinks is None:
            attended.append(
                scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=window,
                    is_causal=window is None,
                    dropout_p=packing.dropout,
                    scale=packing.scaling,
                    enable_gqa=True,
                )
            )
        else:
            attended.append(_explicit_attention(q, k, v, window, packing))
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous()


def _split_keys(tensor: Tensor, packing: Packing) -> Sequence[Tensor]:
    """Split keys or values into those that each sequence attends to.

    split, not slices: the backward of a split is one concatenation, that of n slices is n
    zero-filled copies.
    """
    if packing.key_blocks is None:
        return tensor.split(packing.sequence_lengths, dim=2)
    blocks = tensor.split(packing.key_blocks.lengths, dim=2)
    return [torch.cat([blocks[i] for i in path], dim=2) for path in packing.key_blocks.of_sequence]


def _explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, window: Tensor | None, packing: Packing
) -> Tensor:
    """Attention of one sequence with what SDPA does not support.

    Its scores are materialised, [heads, length, keys].

    Soft-capped scores (arXiv 2408.00118, section 2), and sinks (GPT-OSS): a further column of the
    softmax, whose weight is discarded.
    """
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    if packing.softcap is None:
        scores = query @ key.transpose(2, 3) * packing.scaling
    else:
        scores = packing.softcap * torch.tanh(
            query @ key.transpose(2, 3) * (packing.scaling / packing.softcap)
        )
    allowed = torch.ones_like(scores[0, 0], dtype=torch.bool).tril() if window is None else window
    scores = scores.masked_fill(~allowed, -torch.inf)
    if packing.sinks is not None:
        column = packing.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=3)
        scores = scores - scores.amax(dim=-1, keepdim=True)  # as GPT-OSS, whose softmax is not in float32
    dtype = torch.float32 if packing.sinks is None else scores.dtype
    weights = scores.softmax(-1, dtype=dtype)[..., : key.shape[2]].to(query.dtype)
    return torch.nn.functional.dropout(weights, packing.dropout) @ value


def _window_mask(
    length: int, num_keys: int, sliding_window: int | None, images: Tensor | None, device: torch.device
) -> Tensor | None:
    """Mask of allowed keys of the last `length` of `num_keys` tokens, bool [length, num_keys].

    None for a complete sequence in which a token attends to all tokens up to itself.
    """
    window = sliding_window if sliding_window is not None and num_keys > sliding_window else None
    if images is None and window is None and length == num_keys:
        return None
    positions = torch.arange(num_keys, device=device)
    distance = positions[num_keys - length :, None] - positions
    allowed = distance >= 0
    if images is not None:
        images = images.to(device)
        allowed = allowed | ((images[:, None] == images) & (images >= 0))
    return allowed if window is None else allowed & (distance < window)


def attend_all(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    """Compute `attend_each` in one kernel, if it supports the options and the head size."""
    is_explicit = packing.softcap is not None or packing.sinks is not None
    has_images = any(images is not None for images in packing.image_blocks or ())
    if (
        packing.dropout
        or is_explicit
        or has_images
        or query.shape[3] > WIDEST_HEAD
        or query.shape[3] != value.shape[3]
    ):
        return attend_each(query, key, value, packing)
    from torch.nn.attention.varlen import varlen_attn

    key_lengths = lengths = tuple(packing.sequence_lengths)
    if packing.key_blocks is not None:
        key_lengths = tuple(packing.key_blocks.num_keys())
        key, value = (torch.cat(list(_split_keys(t, packing)), dim=2) for t in (key, value))
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [tokens, heads, head_dim]
    grouped: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in signature(varlen_attn).parameters:
            grouped = {"enable_gqa": True}
        else:  # before torch 2.13
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    attended = varlen_attn(
        q,
        k,
        v,
        _cumulative(lengths, query.device),
        _cumulative(key_lengths, query.device),
        max(lengths),
        max(key_lengths),
        scale=packing.scaling,
        # The kernel counts the tokens before a token, Transformers also counts the token itself.
        # Queries are the last of their keys.
        window_size=(-1 if packing.sliding_window is None else packing.sliding_window - 1, 0),
        **grouped,
    )
    return cast(Tensor, attended)[None]  # a tuple only with `return_aux`


def attend_rows(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scaling: float) -> Tensor:
    """Compute attention in float32, to bits that depend on a query and its allowed keys alone.

    Args:
        query: [batch, heads, new, head_dim]. key: [batch, kv_heads, keys, head_dim]. value: the
            same with its own head_dim. There are at least `MIN_KEYS` keys for equal bits.
        allowed: bool [batch or 1, 1, new, keys], true where a query may attend; for each at least
            one. Keys begin at the same column whatever the batch.

    Returns:
        [batch, new, heads, head_dim] in the dtype of the query.
    """
    batch, heads, new, head_dim = query.shape
    kv_heads = key.shape[1]
    # Heads that share keys are rows of one product. float32, as inside torch's kernels: bfloat16
    # would round the scores.
    grouped = query.reshape(batch, kv_heads, -1, head_dim).float() * scaling
    count = grouped.shape[2]
    grouped = pad(grouped, (0, 0, 0, max(0, MIN_ROWS - count)))
    scores = grouped @ key.float().transpose(2, 3)  # [batch, kv_heads, at least 16, keys]
    by_query = scores[:, :, :count].view(batch, kv_heads, -1, new, key.shape[2])
    by_query.masked_fill_(~allowed[:, :, None], -torch.inf)
    attended = torch.zeros((), device=query.device)
    tiles = zip(scores.softmax(-1).split(KEY_TILE, dim=3), value.float().split(KEY_TILE, dim=2), strict=True)
    for weights, values in tiles:
        attended = attended + weights @ values
    return attended[:, :, :count].to(query.dtype).reshape(batch, heads, new, -1).transpose(1, 2)


class InvariantAttention(torch.autograd.Function):
    """`attend_rows` of one causal sequence; its gradient is that of SDPA, computed again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[1, heads, length, head_dim] -> [1, length, heads, head_dim]."""
        ctx.save_for_backward(query, key, value)
        ctx.scaling = scaling
        length = query.shape[2]
        short = max(-length % MIN_ROWS, MIN_KEYS - length)
        query, key, value = (pad(tensor, (0, 0, 0, short)) for tensor in (query, key, value))
        attended = []
        for start in range(0, length, QUERIES_AT_A_TIME):
            stop = min(start + QUERIES_AT_A_TIME, length + short)
            places = torch.arange(stop, device=query.device)
            allowed = (places <= places[start:, None])[None, None]
            attended.append(
                attend_rows(query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], allowed, scaling)
            )
        return torch.cat(attended, dim=1)[:, :length]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        with torch.enable_grad():
            query, key, value = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
            attended = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=ctx.scaling, enable_gqa=True
            )
        attended.backward(gradient.transpose(1, 2))
        return query.grad, key.grad, value.grad, None


def attend_invariant(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    """Compute `attend_each` to bits that do not depend on the other sequences.

    Raises:
        ModelError: the attention has what `attend_rows` does not support.
    """
    window = packing.sliding_window
    options = {
        "a soft cap": packing.softcap is not None,
        "sinks": packing.sinks is not None,
        "dropout": packing.dropout > 0,
        "a sliding window": window is not None and window < max(packing.sequence_lengths),
        "pictures": any(images is not None for images in packing.image_blocks or ()),
    }
    if has := [name for name, is_on in options.items() if is_on]:
        raise ModelError(
            f"attn_impl is 'batch_invariant', and this model's attention has {' and '.join(has)}, which it "
            f"does not support: use attn_impl=sdpa"
        )
    pieces = zip(*(t.split(packing.sequence_lengths, dim=2) for t in (query, key, value)), strict=True)
    return torch.cat([InvariantAttention.apply(*piece, packing.scaling) for piece in pieces], dim=1)


@lru_cache(maxsize=4)  # shared by the layers of a micro-batch: the copy to the device blocks
def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


# Transformers makes no mask for an attention function whose name has no mask function, as packing
# needs.
AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(FLASH, partial(packed_attention, kernel=attend_all))
AttentionInterface.register(INVARIANT, partial(packed_attention, kernel=attend_invariant))
