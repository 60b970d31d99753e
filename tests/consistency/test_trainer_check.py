"""Trainer check: the packed path agrees with Hugging Face; if not, the engine is not blamed."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from areal_debug.verbs.consistency import command
from consistency import rescoring
from consistency.case import NOISE, Setting
from consistency.check import explain_trainer
from consistency.rescoring import compare_trainer, trainer_logprobs
from consistency.score import load_scorer, score
from consistency.source import read_step
from recorder import open_record


def facts(*arguments):
    done = CliRunner().invoke(command, [*map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_packed_path_gives_the_logprobs_of_hugging_face(model, record):
    sequences = read_step(open_record(record).step(0))
    found = trainer_logprobs(str(model), "float32", "cpu", sequences, 0.7)
    np.testing.assert_allclose(
        found, score(load_scorer(str(model)), sequences, temperature=0.7).logprob, atol=2e-5
    )


def test_three_columns_are_compared_where_all_are_numbers():
    found = compare_trainer(
        "x", np.array([-1.0, -2.0, np.nan]), np.array([-1.5, -2.0, -1.0]), np.array([-1.25, -2.0, -1.0])
    )
    assert (found.num_tokens, found.engine_trainer, found.trainer_model, found.engine_model) == (
        2,
        0.25,
        0.125,
        0.125,
    )


def test_what_the_trainer_computed_instead_is_named(model, record):
    sequences, scorer = read_step(open_record(record).step(0)), load_scorer(str(model))
    setting = Setting(temperature=0.7, noise=NOISE["float32"])
    right = score(scorer, sequences, temperature=0.7).logprob
    at_one = score(scorer, sequences, temperature=1.0).logprob
    later = np.append(right[1:], 0.0)
    assert explain_trainer(scorer, sequences, at_one, setting) == "temperature 1"
    assert explain_trainer(scorer, sequences, later, setting) == "shift 1"
    assert explain_trainer(scorer, sequences, right, setting) == ""


def test_healthy_trainer_is_reported_next_to_the_engine(model, record):
    code, found = facts(record, "--trainer")
    assert (code, found["verdict"]) == (0, "healthy")
    assert found["trainer_check"]["trainer_model"] < 1e-5
    compared = found["trainer_check"]
    assert compared["engine_trainer"] == pytest.approx(compared["engine_model"], rel=1e-3)


def test_trainer_whose_sequences_leak_into_each_other_is_named_and_not_the_engine(record, monkeypatch):
    real = rescoring.trainer_logprobs

    def leaking(path, dtype, device, sequences, temperature):
        right = real(path, dtype, device, sequences, temperature)
        later = sequences.row_of_token[sequences.scored] > 0
        return np.where(later, np.roll(right, 40), right)  # attends to another row

    monkeypatch.setattr("consistency.check.trainer_logprobs", leaking)
    code, found = facts(record, "--trainer")
    assert (code, found["verdict"], found["causes"][0]["id"]) == (1, "mismatch", "R20")
