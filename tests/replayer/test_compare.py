"""Bitwise comparison: differences are named, equal values are counted."""

import math
from dataclasses import replace

from recorder import MicroBatch, Outcome
from replayer.check import compare_outcomes

OUTCOME = Outcome(
    step=3,
    version=4,
    micro_batches=(MicroBatch(0, 0, (0, 1), 17, 0.25, 2.0), MicroBatch(0, 1, (2,), 9, 0.5, 1.0)),
    stats={"grad_norm": 1.5, "time/step": 0.3},
    checksums={"embed.weight": "00ff00ff", "head.weight": "12345678"},
)


def with_loss(loss):
    first, second = OUTCOME.micro_batches
    return replace(OUTCOME, micro_batches=(replace(first, loss=loss), second))


def test_zero_is_not_minus_zero_and_nan_is_nan():
    assert not compare_outcomes(with_loss(0.0), with_loss(-0.0)).identical
    assert compare_outcomes(with_loss(math.nan), with_loss(math.nan)).identical
