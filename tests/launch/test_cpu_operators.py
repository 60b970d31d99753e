"""SGLang's CPU servers compute the operators of Qwen3.5 as Transformers does."""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, torch_recurrent_gated_delta_rule

from areal_core.launch.sglang_process import SHIM

KEY_HEADS, HEADS, KEY, VALUE, WIDTH = 2, 4, 8, 6, 4
LENGTHS = (5, 3)


@pytest.fixture(scope="module")
def operators():
    """The modules alone: the package's own import changes torch, which only a server may see."""
    package = ModuleType("cpu_operators")
    package.__path__ = [str(SHIM / "sgl_kernel")]
    sys.modules["cpu_operators"] = package
    yield importlib.import_module("cpu_operators.operators")
    for name in [name for name in sys.modules if name.startswith("cpu_operators")]:
        del sys.modules[name]


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_gated_norms_of_query_and_key(operators):
    norm = Qwen3_5RMSNorm(KEY)
    norm.weight.data = drawn(KEY)
    q, gate, k = drawn(3, HEADS, KEY), drawn(3, HEADS, KEY + 1)[..., :KEY], drawn(3, KEY_HEADS * KEY)
    found = operators.fused_qk_gemma_rmsnorm_with_gate_cpu(
        torch.cat([q, gate], -1).flatten(1), k, norm.weight.data, norm.weight.data, norm.eps, KEY, HEADS
    )
    wanted = norm(q).view(-1, KEY), norm(k.view(-1, KEY)), gate.flatten(1)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.detach())


def test_gate_multiplies_in_place(operators):
    x, gate = drawn(3, HEADS * VALUE), drawn(3, HEADS, VALUE)
    wanted = x * gate.flatten(1).sigmoid()
    operators.fused_sigmoid_mul_cpu(x, gate)
    torch.testing.assert_close(x, wanted)


def test_projections_are_divided_one_after_another(operators):
    q, k, v, z = drawn(3, 16), drawn(3, 17)[:, :16], drawn(3, 24), drawn(3, 25)[:, :24]
    ba = drawn(3, 2 * HEADS)
    mixed, gate, b, a = operators.fused_qkvzba_split_reshape_cat_contiguous_cpu(
        torch.cat([q, k, v, z], 1), ba, KEY_HEADS, HEADS, KEY, VALUE
    )
    assert torch.equal(mixed, torch.cat([q, k, v], 1))
    assert torch.equal(gate.flatten(1), z)
    assert torch.equal(torch.cat([b, a], 1), ba)


def test_delta_rule_continues_from_the_slots_of_its_requests(operators):
    """Two prompts of which the second one continues after a decoded token."""
    mamba = sys.modules["cpu_operators.mamba"]
    total = sum(LENGTHS)
    q, k = drawn(1, total, KEY_HEADS, KEY), drawn(1, total, KEY_HEADS, KEY + 1)[..., :KEY]
    v, a, b = drawn(1, total, HEADS, VALUE), drawn(total, HEADS), drawn(total, HEADS + 1)[:, :HEADS]
    A_log, dt_bias, states = drawn(HEADS), drawn(HEADS + 1)[:HEADS], torch.zeros(4, HEADS, VALUE, KEY)
    slots = torch.tensor([3, 1])
    g, beta = mamba.fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    ends = torch.tensor([0, LENGTHS[0], total])
    parts = [slice(0, LENGTHS[0]), slice(LENGTHS[0], total)]
    found, pool, _ = mamba.chunk_gated_delta_rule_cpu(q, k, v, g, beta, states, ends, False, True, slots)
    last = [torch.tensor([part.stop - 1 for part in parts])][0]
    again = operators.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log, dt_bias, q[:, last], k[:, last], v[:, last], a[last], b[last], pool, slots,
        torch.tensor([0, 1, 2]), True, 1.0, 20.0,
    )  # fmt: skip
    for row, at in enumerate(parts):
        index = torch.cat([torch.arange(at.start, at.stop), last[row : row + 1]])
        repeated = (rows[:, index].repeat_interleave(HEADS // KEY_HEADS, 2) for rows in (q, k))
        wanted, final = torch_recurrent_gated_delta_rule(
            *repeated, v[:, index], g[:, index], beta[:, index], None, True, True
        )
        torch.testing.assert_close(torch.cat([found[:, at], again[:, row : row + 1]], 1), wanted)
        torch.testing.assert_close(pool[slots[row]], final[0].transpose(1, 2))


def test_convolution_continues_from_the_slots_of_its_requests(operators):
    mamba = sys.modules["cpu_operators.mamba"]
    inputs, weights, states = drawn(6, 9), drawn(6, WIDTH), drawn(4, 6, WIDTH - 1)
    slots, bounds = torch.tensor([2, 0]), torch.tensor([0, 5, 8])
    stale = states.clone()
    fresh = torch.tensor([False, True])
    first = mamba.causal_conv1d_fn_cpu(
        inputs[:, :8], weights, None, "silu", states, fresh, slots, bounds, seq_lens_cpu=[5, 3]
    )
    second = mamba.causal_conv1d_update_cpu(inputs[:, 8:].T, states, weights, None, "silu", torch.tensor([0]))
    after = torch.cat([stale[0], inputs[:, 5:]], 1)  # of the second request
    wanted = [torch.nn.functional.silu((after[:, t : t + WIDTH] * weights).sum(1)) for t in range(4)]
    torch.testing.assert_close(torch.cat([first[:, 5:], second.T], 1), torch.stack(wanted, 1))
    torch.testing.assert_close(first[:, 0], torch.nn.functional.silu(inputs[:, 0] * weights[:, -1]))
