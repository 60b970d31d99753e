"""Recognise the pattern of a difference: shifted by one, scaled, permuted, another support, ...

    difference of a stage ─> its tensor on both sides ─> where it differs ─┐
                                                         how it differs ───┴─> one pattern, or None

A pattern is a hint about the code: a constant factor means a norm, another support a mask, the same
set in another order a loader. None where the numbers do not prove one.
"""

from replayer.patterns.cause import causal_tensor, same_weights
from replayer.patterns.find import find_pattern
from replayer.patterns.pattern import KINDS, Pattern

__all__ = ["KINDS", "Pattern", "causal_tensor", "find_pattern", "same_weights"]
