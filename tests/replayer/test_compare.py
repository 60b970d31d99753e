"""Bitwise comparison: differences are named, equal values are counted."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from recorder import MicroBatch, Outcome
from recorder.difference import Difference
from recorder.testing import SCRIPTED_HEADER
from replayer.check import compare_headers, compare_outcomes

OUTCOME = Outcome(
    step=3,
    version=4,
    micro_batches=(MicroBatch(0, 0, (0, 1), 17, 0.25, 2.0), MicroBatch(0, 1, (2,), 9, 0.5, 1.0)),
    stats={"grad_norm": 1.5, "time/step": 0.3},
    checksums={"embed.weight": "00ff00ff", "head.weight": "12345678"},
)


def with_loss(outcome, index, loss):
    micro_batches = list(outcome.micro_batches)
    micro_batches[index] = replace(micro_batches[index], loss=loss)
    return replace(outcome, micro_batches=tuple(micro_batches))


def test_a_loss_that_differs_in_the_last_bit_is_named():
    replayed = with_loss(OUTCOME, 1, math.nextafter(0.5, 1))
    comparison = compare_outcomes(OUTCOME, replayed)
    assert not comparison.identical
    assert comparison.differences == (
        Difference("minibatch 0, micro-batch 1, loss", "0x1.0000000000000p-1", "0x1.0000000000001p-1"),
    )


def test_stats_and_parameters_that_differ_are_named_apart():
    replayed = replace(
        OUTCOME,
        stats={"grad_norm": 1.25, "time/step": 0.3},
        checksums=OUTCOME.checksums | {"head.weight": "12345679"},
    )
    comparison = compare_outcomes(OUTCOME, replayed)
    assert [d.where for d in comparison.stats] == ["grad_norm"]
    assert comparison.parameters == (Difference("head.weight", "12345678", "12345679"),)
    assert comparison.losses == ()


def test_a_stat_or_parameter_on_one_side_only_is_a_difference():
    replayed = replace(OUTCOME, stats={"time/step": 0.3, "kl": 0.0}, checksums={"embed.weight": "00ff00ff"})
    comparison = compare_outcomes(OUTCOME, replayed)
    assert [(d.where, d.recorded is None, d.current is None) for d in comparison.differences] == [
        ("grad_norm", False, True),
        ("kl", True, False),
        ("head.weight", False, True),
    ]


def test_zero_is_not_minus_zero_and_nan_is_nan():
    assert not compare_outcomes(with_loss(OUTCOME, 0, 0.0), with_loss(OUTCOME, 0, -0.0)).identical
    assert compare_outcomes(with_loss(OUTCOME, 0, math.nan), with_loss(OUTCOME, 0, math.nan)).identical


@given(st.floats(), st.floats())
def test_two_losses_are_identical_exactly_when_their_bits_are(left, right):
    identical = compare_outcomes(with_loss(OUTCOME, 0, left), with_loss(OUTCOME, 0, right)).identical
    assert identical == (left.hex() == right.hex())


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
    assert compare_headers(SCRIPTED_HEADER, SCRIPTED_HEADER).identical
