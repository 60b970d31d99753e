"""`areal-debug consistency`: verdict, JSON and exit code, with and without a planted fault."""

import json
from contextlib import contextmanager

from click.testing import CliRunner
from peft import LoraConfig, get_peft_model

from areal_core.engine.model import load_model
from areal_debug.verbs import consistency
from areal_debug.verbs.consistency import command

from .records import judged, save_model, write_record


def run(*arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_stale_engine_is_unknown_until_the_previous_checkpoint_is_given(record, model, tmp_path):
    newer = save_model(tmp_path / "newer", seed=9)
    found = json.loads(run(record, "--model", newer, "--json").stdout)
    assert found["verdict"] in ("unknown", "mismatch")
    assert "R24" not in [cause["id"] for cause in found["causes"]]
    code, found = judged(record, "--model", newer, "--previous", model)
    assert (code, found["causes"][0]["id"]) == (1, "R24")


def test_the_base_of_an_adapter_is_what_the_engine_may_have(record, model, tmp_path):
    adapted = get_peft_model(load_model(str(model)), LoraConfig(r=2, target_modules=["v_proj", "o_proj"]))
    for name, parameter in adapted.named_parameters():
        parameter.data += 0.3 * ("lora_B" in name)
    adapted.save_pretrained(tmp_path / "adapter")
    code, found = judged(record, "--model", tmp_path / "adapter")
    assert (code, found["model"]) == (1, str(tmp_path / "adapter"))
    assert [found["causes"][0][key] for key in ("id", "name")] == ["R32", "adapter not loaded in the engine"]


def test_a_mistyped_model_is_refused_before_anything_is_loaded(record):
    for done in (run(record, option, "modle") for option in ("--model", "--previous", "--base")):
        assert (done.exit_code, "there is no model at modle" in done.output) == (2, True)


def test_first_weights_are_not_compared_with_later_steps(model, tmp_path):
    record = write_record(tmp_path / "record", model, num_steps=2, updated=True)
    for done in (run(record, "--step", 1), run(record, "--step", 1, "--model", model)):
        assert done.exit_code == 2
        assert f"{model} is not the model of step 1: its weights are of version 0, those that" in done.output
        assert "and it was sampled with version 1" in done.output
    done = run(record)
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
    done = run(record, "--step", 3, "--replay-weights", "--json")
    found = json.loads(done.stdout)["model"]
    assert (done.exit_code, found, replayed_to) == (0, "replayed to step 1", [1])
