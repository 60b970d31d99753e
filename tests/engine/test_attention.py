"""Attention of packed sequences, of one new token over a cache, and by FlashAttention's kernel."""

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from areal_core.embedded.replica import decoding_attention
from areal_core.engine import attention as F
from areal_core.engine.attention import Packing, packed_attention


def plain_attention(q, k, v, scaling, allowed):
    """Compute softmax attention in float64 where the mask allows it; [rows, length, heads, dim]."""
    k, v = (t.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = (q.double() @ k.transpose(2, 3)) * scaling
    return (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def causal(length, window=None):
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < (window or length))


@pytest.mark.parametrize("window", [None, 3])
def test_each_packed_sequence_attends_to_itself_alone(window):
    torch.manual_seed(0)
    lengths = [5, 1, 4]
    q, k, v = (torch.randn(1, heads, 10, 8, requires_grad=True) for heads in (4, 2, 2))
    packed, _ = packed_attention(
        None, q, k, v, None, sequence_lengths=lengths, scaling=0.3, sliding_window=window
    )
    alone = [
        plain_attention(*piece, 0.3, causal(piece[0].shape[2], window))
        for piece in zip(*(t.split(lengths, 2) for t in (q, k, v)), strict=True)
    ]
    expected = torch.cat(alone, dim=1)
    torch.testing.assert_close(packed.double(), expected, rtol=0, atol=1e-6)
    packed_gradient = torch.autograd.grad(packed.sum(), (q, k, v))
    for got, want in zip(packed_gradient, torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


HEADS, KV_HEADS, HEAD_DIM, TOKENS = 6, 2, 16, 33


class Layer(torch.nn.Module):
    num_key_value_groups = HEADS // KV_HEADS


def tensors(new_tokens, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, new_tokens), (KV_HEADS, TOKENS), (KV_HEADS, TOKENS)
    return [torch.randn(4, *shape, HEAD_DIM, generator=generator).to(dtype) for shape in shapes]


def left_padded(new_tokens):
    """Return a mask of rows with 0, 1, 9 and 32 columns of padding."""
    allowed = torch.arange(TOKENS) >= torch.tensor([0, 1, 9, 32])[:, None]
    return allowed[:, None, None].expand(4, 1, new_tokens, TOKENS)


def test_one_new_token_attends_to_what_its_mask_allows():
    query, key, value = tensors(1, torch.float32)
    mask = left_padded(1)
    attended, _ = decoding_attention(Layer(), query, key, value, mask)
    expected = plain_attention(query, key, value, HEAD_DIM**-0.5, mask)
    torch.testing.assert_close(attended.double(), expected, rtol=0, atol=1e-6)
    everything, _ = decoding_attention(Layer(), query, key, value, None, scaling=HEAD_DIM**-0.5)
    expected = plain_attention(query, key, value, HEAD_DIM**-0.5, torch.ones_like(mask))
    torch.testing.assert_close(everything.double(), expected, rtol=0, atol=1e-6)


def test_bfloat16_rounds_no_more_than_the_kernel_does():
    query, key, value = tensors(1, torch.bfloat16)
    mask = left_padded(1)
    expected = plain_attention(query, key, value, HEAD_DIM**-0.5, mask)
    ours, _ = decoding_attention(Layer(), query, key, value, mask)
    theirs, _ = sdpa_attention_forward(Layer(), query, key, value, mask)
    assert ours.dtype == torch.bfloat16
    assert (ours - expected).abs().mean() <= 1.01 * (theirs - expected).abs().mean()


LENGTHS = [5, 1, 90]
SCALING = 0.25


@pytest.mark.parametrize(
    ("attn_impl", "device", "dtype", "implementation", "reason"),
    [
        ("flash_attention_2", "cuda", torch.bfloat16, F.FLASH, "torch's flash-attention"),
        ("flash_attention_2", "cuda", torch.float32, F.PACKED, "not in float32"),
        ("flash_attention_2", "cpu", torch.bfloat16, F.PACKED, "no flash-attention on a CPU"),
        ("sdpa", "cuda", torch.bfloat16, F.PACKED, "as attn_impl requests"),
    ],
)
def test_flash_attention_is_chosen_where_it_exists(
    monkeypatch, attn_impl, device, dtype, implementation, reason
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    choice = F.choose_attention(attn_impl, device, dtype)
    assert choice.implementation == implementation
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("sliding_window", "window"),
    [(None, (-1, 0)), (7, (6, 0))],  # the token itself is not counted
)
def test_the_kernel_gets_sequences_end_to_end_and_the_window_in_its_own_count(
    monkeypatch, sliding_window, window
):
    got = {}

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
        ends, longest = cu_seq_q.tolist(), (max_q, max_k)
        got.update(ends=ends, longest=longest, shapes=(query.shape, key.shape))
        got.update(scale=scale, window_size=window_size)
        return query

    def newer(*args, enable_gqa, **options):
        got["enable_gqa"] = enable_gqa
        return older(*args, **options)

    query, key, value = (torch.randn(1, heads, 96, 8) for heads in (4, 2, 2))
    for kernel, key_heads, grouped in ((newer, 2, {"enable_gqa": True}), (older, 4, {})):
        got.clear()
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
        packing = Packing(LENGTHS, SCALING, sliding_window=sliding_window)
        attended = F.attend_all(query, key, value, packing)
        assert torch.equal(attended, query.transpose(1, 2))  # [1, tokens, heads, head_dim]
        assert got == grouped | {
            "ends": [0, 5, 6, 96],
            "longest": (90, 90),
            "shapes": ((96, 4, 8), (96, key_heads, 8)),
            "scale": SCALING,
            "window_size": window,
        }
