"""Linear layers with sorted weights: the same numbers, also after the weights were written to."""

import copy

import pytest
import torch

from areal_core.embedded.replica import computes_bfloat16, pack_linear_layers

pytestmark = pytest.mark.skipif(not computes_bfloat16(), reason="this CPU does not compute in bfloat16")


@pytest.fixture
def layers():
    """Return a layer with a bias and one without, and a packed copy of both."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(96, 160), torch.nn.Linear(160, 64, bias=False)).bfloat16()
    packed = copy.deepcopy(plain)
    pack_linear_layers(packed)
    return plain, packed


def assert_alike(plain, packed):
    rows = torch.randn(5, 3, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = torch.nn.Sequential(*plain).double()(rows.double())
        plain.bfloat16()
        torch.testing.assert_close(packed(rows).double(), expected, rtol=0.02, atol=0.005)
        assert packed(rows[0]).shape == (3, 64)


def test_new_weights_are_used_from_the_next_call_on(layers):
    plain, packed = layers
    assert_alike(plain, packed)
    assert packed[0].forward.packed is not None
    with torch.no_grad():
        for theirs, ours in zip(plain.parameters(), packed.parameters(), strict=True):
            theirs.copy_(torch.randn_like(theirs) / 10)
            ours.copy_(theirs)
    assert_alike(plain, packed)
