"""`consistency.every_k_steps`: sums by lag, warnings, and a run in which a weight update fails."""

import json
import logging

import numpy as np
import pytest

from areal_core.embedded.engine import ReplicaUpdate
from consistency.case import NOISE
from consistency.entry.in_loop import InLoop, Reading, Sums, join, sums_by_lag, suspicion_of

from ..replayer.conftest import tiny_config, train_sampled


def test_sums_by_lag_are_those_of_the_tokens_of_each_lag():
    found = sums_by_lag(np.array([0, 2, 0, 0]), np.array([0.5, -1.0, -0.25, np.nan]))
    assert found[0] == Sums(2, 0.75, pytest.approx(np.expm1(0.5) - 0.5 + np.expm1(-0.25) + 0.25), 0, 1)
    assert found[2] == Sums(1, 1.0, pytest.approx(np.expm1(-1.0) + 1.0), 1, 0)
    assert join([found, {0: Sums(1, 0.25)}])[0].num_tokens == 3


def reading(step, *mean_abs_by_lag):
    return Reading(step, step, {lag: Sums(100, 100 * value) for lag, value in enumerate(mean_abs_by_lag)})


def test_old_tokens_may_differ_as_the_policy_moves():
    assert suspicion_of(reading(3, 0.01, 0.3, 0.6), [0.01, 0.01], NOISE["bfloat16"]) is None


def test_difference_since_the_first_check_is_not_blamed_on_an_update():
    assert suspicion_of(reading(0, 0.2), [], NOISE["bfloat16"]).id == "R01"


def test_lost_weight_update_is_named_in_its_step(tmp_path, tiny_model, monkeypatch, caplog):
    real = ReplicaUpdate.send

    def loses_the_third(self, weights, version):
        kept = list(weights)
        if version != 3:
            real(self, iter(kept), version)

    monkeypatch.setattr(ReplicaUpdate, "send", loses_the_third)
    config = tiny_config(tmp_path, tiny_model, 5, actor__optimizer={"lr": 1e-2})
    check = InLoop(1, tmp_path / "consistency.jsonl", lambda local: [local])
    with caplog.at_level(logging.WARNING, "consistency.entry.in_loop"):
        train_sampled(config, [lambda trainer: check], reward="odd_tokens")
    lines = [json.loads(line) for line in (tmp_path / "consistency.jsonl").read_text().splitlines()]
    suspected = {line["step"]: line["suspicion"]["id"] for line in lines if line["suspicion"]}
    assert suspected == {3: "R24"}
    assert all(line["mean_abs"] < 1e-4 for line in lines if line["step"] != 3)
    assert [message for message in caplog.messages if "stale weights in the engine" in message] != []
