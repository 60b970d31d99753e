"""Trainer check: the packed path agrees with Hugging Face; if not, the engine is not blamed."""

from dataclasses import replace

import numpy as np
import pytest

from consistency.case import NOISE, Request, Setting
from consistency.check import check, explain_trainer
from consistency.errors import OtherModel
from consistency.score import load_scorer, score
from consistency.source import read_record, read_step
from recorder import open_record

from .records import save_model


def test_what_the_trainer_computed_instead_is_named(model, record):
    sequences, scorer = read_step(open_record(record).step(0)), load_scorer(str(model))
    setting = Setting(temperature=0.7, noise=NOISE["float32"])
    right = score(scorer, sequences, temperature=0.7).logprob
    at_one = score(scorer, sequences, temperature=1.0).logprob
    later = np.append(right[1:], 0.0)
    assert explain_trainer(scorer, sequences, at_one, setting) == "temperature 1"
    assert explain_trainer(scorer, sequences, later, setting) == "shift 1"
    assert explain_trainer(scorer, sequences, right, setting) == ""


def test_trainer_whose_sequences_leak_into_each_other_is_named_and_not_the_engine(model, record):
    sampled = read_record(open_record(record), [0])
    [rows] = sampled.chunks.values()
    right = score(load_scorer(str(model)), rows, temperature=sampled.sampling.temperature).logprob
    later = rows.row_of_token[rows.scored] > 0
    leaking = np.where(later, np.roll(right, 40), right)  # attends to another row
    found = check(replace(sampled, trainer=leaking), Request(str(model))).diagnosis
    assert (found.verdict, found.causes[0].id) == ("mismatch", "R20")


def test_a_model_that_neither_trainer_nor_engine_has_is_refused_or_doubted(model, record, tmp_path):
    sampled = read_record(open_record(record), [0])
    [rows] = sampled.chunks.values()
    own, engine = score(load_scorer(str(model)), rows).logprob, rows.engine_logprobs[rows.scored]
    other = Request(str(save_model(tmp_path / "other", seed=9)), base=str(model), is_shown=False)
    with pytest.raises(OtherModel, match="agree with the engine's"):
        check(replace(sampled, trainer=own), other)
    for column in (None, engine):  # the engine's own column is no second witness
        found = check(replace(sampled, trainer=column), other).diagnosis
        assert max(cause.confidence for cause in found.causes) <= 0.75
        assert "which explains this just as well" in found.causes[0].refute
