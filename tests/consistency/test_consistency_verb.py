"""`areal-debug consistency` on records, imported dumps, and what cannot be compared."""

import functools
import json
from contextlib import contextmanager

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model

from areal_core.engine.model import load_model
from areal_debug.verbs import consistency
from consistency import transforms
from consistency.tokens import Sequences
from tests import json_schema
from tests.command_line import invoke, printed

from .fault_server import SGLANG, application, hosting, serving_rows
from .records import judged, save_model, write_record


def test_a_stale_engine_is_named_by_the_previous_checkpoint(record, model, tmp_path):
    newer = save_model(tmp_path / "newer", seed=9)
    code, found = judged(record, "--model", newer, "--previous", model)
    assert (code, found["causes"][0]["id"]) == (1, "R24")


@pytest.mark.long
def test_the_base_of_an_adapter_is_what_the_engine_may_have(record, model, tmp_path):
    adapted = get_peft_model(load_model(str(model)), LoraConfig(r=2, target_modules=["v_proj", "o_proj"]))
    for name, parameter in adapted.named_parameters():
        parameter.data += 0.3 * ("lora_B" in name)
    adapted.save_pretrained(tmp_path / "adapter")
    code, found = judged(record, "--model", tmp_path / "adapter")
    assert (code, found["model"]) == (1, str(tmp_path / "adapter"))
    assert [found["causes"][0][key] for key in ("id", "name")] == ["R32", "adapter not loaded in the engine"]


def test_a_mistyped_model_is_refused_before_anything_is_loaded(record):
    for done in (
        invoke("consistency", record, option, "modle") for option in ("--model", "--previous", "--base")
    ):
        assert (done.exit_code, "there is no model at modle" in done.output) == (2, True)


def test_first_weights_are_not_compared_with_later_steps(model, tmp_path):
    record = write_record(tmp_path / "record", model, num_steps=2, updated=True)
    for done in (
        invoke("consistency", record, "--step", 1),
        invoke("consistency", record, "--step", 1, "--model", model),
    ):
        assert done.exit_code == 2
        assert f"{model} is not the model of step 1: its weights are of version 0, those that" in done.output
        assert "and it was sampled with version 1" in done.output
    done = invoke("consistency", record)
    assert done.exit_code == 0
    assert (
        "only step 0 of 2 steps was compared: an engine that missed a later update is not seen" in done.output
    )


def test_the_weights_that_sampled_a_step_are_replayed_and_not_those_that_it_starts_from(
    model, tmp_path, monkeypatch
):
    def change(batch):
        batch["versions"][batch["loss_mask"] == 1] = 1

    @contextmanager
    def replayed(record, step):
        replayed_to.append(step)
        yield str(model)

    replayed_to: list[int] = []
    monkeypatch.setattr(consistency, "replayed_model", replayed)
    record = write_record(tmp_path / "record", model, num_steps=4, change=change)
    done = invoke("consistency", record, "--step", 3, "--replay-weights", "--json")
    found = json.loads(done.stdout)["model"]
    assert (done.exit_code, found, replayed_to) == (0, "replayed to step 1", [1])


def imported(record, folder):
    """The record's tokens as slime would have left them, read back."""
    assert invoke("record", "export", record, "--format", "slime", "--to", folder / "0.pt").exit_code == 0
    assert invoke("record", "import", folder / "0.pt", "--to", folder / "imported").exit_code == 0
    return folder / "imported"


def test_imported_dump_is_checked_at_the_given_temperature(model, tmp_path):
    transform = functools.partial(transforms.at_temperature, temperature=0.7)
    dump = imported(write_record(tmp_path / "record", model, draws=transform, reports=transform), tmp_path)
    done = invoke("consistency", dump, "--model", model, "--temperature", "0.7", "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["verdict"], found["num_tokens"]) == (0, "healthy", 12 * 50)
    done = invoke("consistency", dump, "--model", model, "--json")
    found = json.loads(done.stdout)
    json_schema.check("consistency", found)
    assert (done.exit_code, found["causes"][0]["id"]) == (1, "R01")


def test_imported_dump_without_a_model_is_one_sentence(model, tmp_path):
    done = invoke("consistency", imported(write_record(tmp_path / "record", model), tmp_path))
    assert done.exit_code == 2
    assert "does not name the model that sampled it: give --model PATH" in done.stderr


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
