"""Engines, models and dumps that cannot be compared: one sentence each, exit code 2."""

import json

import numpy as np
import pytest

from consistency.tokens import Sequences
from tests.command_line import invoke, printed

from .fault_server import SGLANG, application, hosting, serving_rows

PROMPT = [5, 6, 7]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"input_ids": PROMPT}) + "\n")
    return file


def complaint(*arguments):
    return printed("consistency", *arguments, code=2)


def complaint_about(routes, model, prompts):
    with hosting(application(routes)) as address:
        return complaint("--engine", address, "--model", model, "--prompts", prompts)


def generating(meta):
    routes = {"/server_info": SGLANG, "/model_info": {"model_path": "m"}}
    return routes | {"/generate": lambda request: {"meta_info": meta}}


def test_server_without_logprobs(model, prompts):
    printed = complaint_about(generating({"weight_version": "default", "cached_tokens": 0}), model, prompts)
    assert "/generate returned no logprobs" in printed
    assert "it must support return_logprob" in printed


def test_tokens_beyond_the_models_vocabulary_mean_another_tokenizer(model, prompts):
    row = Sequences(
        np.array([*PROMPT, 4000, 9]), np.array([0, 5]), np.array([0, 0, 0, 1, 1], bool), np.full(5, -1.0)
    )
    with serving_rows(row) as address:
        printed = complaint("--engine", address, "--model", model, "--prompts", prompts)
    assert "token 4000 was sampled and the model has a vocabulary of 105: the tokenizers differ" in printed


def test_unusable_logprobs_are_counted_and_not_averaged(model, prompts):
    values = np.array([0, 0, 0, np.nan, -1.0, -np.inf, 0.5])
    row = Sequences(np.array([*PROMPT, 8, 9, 10, 11]), np.array([0, 7]), np.arange(7) > 2, values)
    row.engine_logprobs[5] = -9999.0
    with serving_rows(row) as address:
        done = invoke("consistency", "--engine", address, "--model", model, "--prompts", prompts, "--json")
    found = json.loads(done.stdout)
    counted = ("engine_nan", "engine_minus_infinity", "engine_above_zero")
    assert [found["excluded"][name] for name in counted] == [1, 1, 1]
    assert found["num_tokens"] == 1
    assert np.isfinite(found["metrics"]["mean_abs"])
    assert "recorded rows are not scored again" in found["notes"][0]
