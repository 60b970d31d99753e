import pytest
import torch

from areal_core.engine import attention as F
from areal_core.engine.attention import Packing

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
