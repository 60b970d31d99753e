"""Attention of one new token over a cache, against the formula in float64 and torch's kernel."""

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from areal_core.embedded.replica import decoding_attention

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


def reference_attention(query, key, value, mask):
    key, value = (t.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (key, value))
    scores = query.double() @ key.transpose(2, 3) * HEAD_DIM**-0.5
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def test_one_new_token_attends_to_what_its_mask_allows():
    query, key, value = tensors(1, torch.float32)
    mask = left_padded(1)
    attended, _ = decoding_attention(Layer(), query, key, value, mask)
    torch.testing.assert_close(
        attended.double(), reference_attention(query, key, value, mask), rtol=0, atol=1e-6
    )
    everything, _ = decoding_attention(Layer(), query, key, value, None, scaling=HEAD_DIM**-0.5)
    expected = reference_attention(query, key, value, torch.ones_like(mask))
    torch.testing.assert_close(everything.double(), expected, rtol=0, atol=1e-6)


def test_bfloat16_rounds_no_more_than_the_kernel_does():
    query, key, value = tensors(1, torch.bfloat16)
    mask = left_padded(1)
    expected = reference_attention(query, key, value, mask)
    ours, _ = decoding_attention(Layer(), query, key, value, mask)
    theirs, _ = sdpa_attention_forward(Layer(), query, key, value, mask)
    assert ours.dtype == torch.bfloat16
    assert (ours - expected).abs().mean() <= 1.01 * (theirs - expected).abs().mean()
