"""Bitwise comparison: differences are named, equal values are counted."""

import math
from dataclasses import replace

from recorder import MicroBatch, Outcome
from recorder.difference import Difference
from recorder.testing import SCRIPTED_HEADER
from replayer.check import HeaderComparison, compare_headers, compare_outcomes

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


def test_config_environment_and_model_differences_come_by_name():
    environment = {"torch": {"build": "2.14.1"}, "code": {"commit": None, "dirty_sha256": None}}
    current = replace(
        SCRIPTED_HEADER,
        config={"seed": 1, "actor": {"lr": 2e-6, "eps_clip": 0.2}},
        environment=environment,
        model={"path": "elsewhere", "files": {"config.json": {"size_bytes": 4, "crc32c": "00000000"}}},
    )
    comparison = compare_headers(SCRIPTED_HEADER, current)
    assert comparison.config == (
        Difference("actor.eps_clip", None, 0.2),
        Difference("actor.lr", 1e-06, 2e-06),
    )
    assert comparison.environment == (Difference("torch.build", "2.13.0", "2.14.1"),)
    assert [d.where for d in comparison.model] == ["config.json"]
    assert compare_headers(SCRIPTED_HEADER, SCRIPTED_HEADER) == HeaderComparison((), (), ())
