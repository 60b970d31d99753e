"""Trainer check: the packed path agrees with Hugging Face; if not, the engine is not blamed."""

import json

import numpy as np
from click.testing import CliRunner

from areal_debug.verbs.consistency import command
from consistency import rescoring
from consistency.case import NOISE, Setting
from consistency.check import explain_trainer
from consistency.score import load_scorer, score
from consistency.source import read_step
from recorder import open_record


def facts(*arguments):
    done = CliRunner().invoke(command, [*map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_what_the_trainer_computed_instead_is_named(model, record):
    sequences, scorer = read_step(open_record(record).step(0)), load_scorer(str(model))
    setting = Setting(temperature=0.7, noise=NOISE["float32"])
    right = score(scorer, sequences, temperature=0.7).logprob
    at_one = score(scorer, sequences, temperature=1.0).logprob
    later = np.append(right[1:], 0.0)
    assert explain_trainer(scorer, sequences, at_one, setting) == "temperature 1"
    assert explain_trainer(scorer, sequences, later, setting) == "shift 1"
    assert explain_trainer(scorer, sequences, right, setting) == ""


def test_trainer_whose_sequences_leak_into_each_other_is_named_and_not_the_engine(record, monkeypatch):
    real = rescoring.trainer_logprobs

    def leaking(path, dtype, device, sequences, temperature):
        right = real(path, dtype, device, sequences, temperature)
        later = sequences.row_of_token[sequences.scored] > 0
        return np.where(later, np.roll(right, 40), right)  # attends to another row

    monkeypatch.setattr("consistency.check.trainer_logprobs", leaking)
    code, found = facts(record, "--trainer")
    assert (code, found["verdict"], found["causes"][0]["id"]) == (1, "mismatch", "R20")
