"""Outcomes are stored as hex floats: equal text means equal bits."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder import DamagedRecord, MicroBatch, Outcome, OutcomeObserver, UnknownFormat
from recorder.format import outcome_document, parse_outcome

OUTCOME = Outcome(3, 4, (MicroBatch(0, 1, (0, 2), 17, 0.1, 2.0),), {"loss": 0.1}, {"w": "00ff00ff"})


@given(st.floats())
def test_every_float_comes_back_with_its_bits(value):
    outcome = dataclasses.replace(OUTCOME, stats={"loss": value})
    back = parse_outcome(json.loads(json.dumps(outcome_document(outcome))), "x").stats["loss"]
    assert back.hex() == value.hex()


def test_an_outcome_round_trips():
    document = json.loads(json.dumps(outcome_document(OUTCOME)))
    assert document["stats"] == {"loss": "0x1.999999999999ap-4"}
    assert parse_outcome(document, "x") == OUTCOME


def test_unknown_and_missing_members_are_refused_by_name():
    document = outcome_document(OUTCOME)
    with pytest.raises(UnknownFormat, match=r"x has unknown keys \['gradients'\]"):
        parse_outcome(document | {"gradients": {}}, "x")
    del document["checksums"]
    with pytest.raises(DamagedRecord, match=r"x: lacks \['checksums'\]"):
        parse_outcome(document, "x")


def test_the_observer_gathers_the_micro_batches_of_one_step_only():
    seen = []
    observer = OutcomeObserver(seen.append)
    for step in (0, 1):
        observer("batch", step=step, version=step, batch={}, rng={})
        observer(
            "micro_batch", step=step, minibatch=0, micro_batch=0, rows=[1], num_tokens=5, loss=0.5, weight=2
        )
        observer(
            "step", step=step, version=step + 1, plan={}, stats={"a": math.inf}, checksums={"w": "00000001"}
        )
    observer("end", steps=2, error=None)
    assert [outcome.step for outcome in seen] == [0, 1]
    assert seen[1] == Outcome(
        1, 2, (MicroBatch(0, 0, (1,), 5, 0.5, 2.0),), {"a": math.inf}, {"w": "00000001"}
    )
