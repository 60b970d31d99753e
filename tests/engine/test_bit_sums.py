"""Sums of bits: equal for equal bits, and they locate one wrong element."""

import random

import pytest
import torch

from areal_core.engine.bit_sums import Element, Sums, locate
from areal_core.engine.observe_bits import bit_sums
from areal_core.testing.bit_flips import flip_bit


def sums_of(tensor: torch.Tensor) -> Sums:
    return Sums("output of a", tuple(tensor.shape), *bit_sums(tensor).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_flipped_bit_is_located_in_any_element_and_dtype(dtype):
    chosen = random.Random(0)
    tensor = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = sums_of(tensor)
    for _ in range(50):
        element, bit = chosen.randrange(tensor.numel()), chosen.randrange(4, 8 * tensor.element_size())
        flipped = tensor.clone()
        flip_bit(flipped, element, bit)
        index = (element // 35, element // 7 % 5, element % 7)
        assert locate(sums_of(flipped), before) == Element(index, bit)
        assert locate(before, sums_of(flipped)) == Element(index, bit)


def test_several_elements_equal_tensors_and_rounding_are_not_located():
    tensor = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    several, rounded = tensor.clone(), tensor.clone()
    for element in (3, 40, 100):
        flip_bit(several, element, 20 + element % 7)
    flip_bit(rounded, 9, 0)
    assert locate(sums_of(tensor), sums_of(several)) is None
    assert locate(sums_of(tensor), sums_of(rounded)) is None
    assert sums_of(tensor) != sums_of(rounded)
    assert locate(sums_of(tensor), sums_of(tensor.clone())) is None


def test_an_element_that_changed_by_more_than_a_bit_is_located_without_one():
    other = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 3.5]])
    assert locate(sums_of(torch.ones(2, 3)), sums_of(other)) == Element((1, 2), None)
