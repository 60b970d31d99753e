import pytest
import torch

from areal_core.engine.attention import packed_attention


def plain_attention(q, k, v, scaling, window=None):
    """Compute softmax attention in float64, with a mask of [length, length]."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    allowed = (distance >= 0) & (distance < (window or q.shape[2]))
    scores = (q.double() @ k.double().transpose(2, 3)) * scaling
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v.double()


@pytest.mark.parametrize("window", [None, 3])
def test_each_packed_sequence_attends_to_itself_alone(window):
    torch.manual_seed(0)
    lengths = [5, 1, 4]
    q, k, v = (torch.randn(1, heads, 10, 8, requires_grad=True) for heads in (4, 2, 2))
    packed, _ = packed_attention(
        None, q, k, v, None, sequence_lengths=lengths, scaling=0.3, sliding_window=window
    )
    alone = [
        plain_attention(*piece, 0.3, window)
        for piece in zip(*(t.split(lengths, 2) for t in (q, k, v)), strict=True)
    ]
    expected = torch.cat(alone, dim=2).transpose(1, 2)
    torch.testing.assert_close(packed.double(), expected, rtol=0, atol=1e-6)
    packed_gradient = torch.autograd.grad(packed.sum(), (q, k, v))
    for got, want in zip(packed_gradient, torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
