"""Trainer check: the packed path agrees with Hugging Face; if not, the engine is not blamed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_core.engine.model import load_tokenizer_at
from consistency.alternatives.probes import NO_THOUGHTS, with_prompts
from consistency.case import NOISE, Request, Setting
from consistency.check import check, explain_trainer
from consistency.errors import OtherModel
from consistency.score import load_scorer, score
from consistency.source import read_record
from consistency.transforms import select_rows
from recorder import open_record

from .records import save_model


@pytest.fixture
def whole(record):
    return read_record(open_record(record), [0])


@pytest.fixture
def sampled(whole):
    """Half of the rows, which are enough for all but rounding."""
    (rows,) = whole.chunks.values()
    return replace(whole, chunks={"step-000000": select_rows(rows, np.arange(12))})


@pytest.fixture
def rows(sampled):
    return sampled.chunks["step-000000"]


def test_what_the_trainer_computed_instead_is_named(rows, scorer):
    setting = Setting(temperature=0.7, noise=NOISE["float32"])
    right, at_one = (score(scorer, rows, temperature=value).logprob for value in (0.7, 1.0))
    known = {"": right, "temperature 1": at_one, "shift 1": np.append(right[1:], 0.0)}
    for name, trainer in known.items():
        assert explain_trainer(scorer, rows, trainer, setting) == name


def test_a_trainer_that_rounds_to_bfloat16_is_not_blamed_beside_an_exact_engine(model, whole, scorer):
    (rows,) = whole.chunks.values()
    low = load_scorer(str(model), torch.bfloat16)
    rows.engine_logprobs[rows.scored], trainer = (score(one, rows).logprob for one in (scorer, low))
    found = check(replace(whole, trainer=trainer), Request(str(model))).diagnosis
    assert (found.verdict, [cause.id for cause in found.causes]) == ("healthy", ["R35"])


@pytest.mark.parametrize("name", ["the chat template applied again", "an empty block of thoughts added"])
def test_a_prompt_in_another_rendering_is_named(name, model, sampled, rows, scorer):
    tokenizer = load_tokenizer_at(str(model))

    def seen(ids):
        message, text = [{"role": "user", "content": tokenizer.decode(ids)}], tokenizer.decode(ids)
        again = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(again if "again" in name else text + NO_THOUGHTS, add_special_tokens=False)

    rows.engine_logprobs[rows.scored] = score(scorer, with_prompts(rows, seen)).logprob
    found = check(sampled, Request(str(model))).diagnosis
    assert (found.causes[0].id, name in found.causes[0].name) == ("R16", True)


def test_a_trainer_whose_rows_leak_into_each_other_is_named(model, sampled, rows, scorer):
    right = score(scorer, rows, temperature=sampled.sampling.temperature).logprob
    later = rows.row_of_token[rows.scored] > 0
    leaking = np.where(later, np.roll(right, 40), right)  # attends to another row
    found = check(replace(sampled, trainer=leaking), Request(str(model))).diagnosis
    assert (found.verdict, found.causes[0].id) == ("mismatch", "R20")


@pytest.mark.long
def test_a_model_of_neither_side_is_refused_or_doubted(model, sampled, rows, scorer, tmp_path):
    own, engine = score(scorer, rows).logprob, rows.engine_logprobs[rows.scored]
    other = Request(str(save_model(tmp_path / "other", seed=9)), base=str(model), is_shown=False)
    with pytest.raises(OtherModel, match="agree with the engine's"):
        check(replace(sampled, trainer=own), other)
    for column in (None, engine):  # the engine's own column is no second witness
        found = check(replace(sampled, trainer=column), other).diagnosis
        assert max(cause.confidence for cause in found.causes) <= 0.75
        assert "which explains this just as well" in found.causes[0].refute


def test_a_given_checkpoint_is_tried_on_what_could_be_rounding(model, sampled, rows, scorer, tmp_path):
    newer = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        newer.model.layers[0].mlp.down_proj.weight.mul_(1.01)
    newer.save_pretrained(tmp_path / "newer")
    rows.engine_logprobs[rows.scored] = score(scorer, rows).logprob
    found = check(sampled, Request(str(tmp_path / "newer"))).diagnosis
    assert (found.verdict, found.causes[0].confidence <= 0.9) == ("healthy", True)
    found = check(sampled, Request(str(tmp_path / "newer"), previous=str(model))).diagnosis
    assert (found.verdict, found.causes[0].id) == ("mismatch", "R24")
