"""`areal-debug consistency`: verdict, JSON and exit code, with and without a planted fault."""

import functools
import json

import pytest
from click.testing import CliRunner

from areal_debug.verbs.consistency import command
from consistency import transforms

from .records import save_model, write_record


def run(*arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def facts(*arguments):
    done = run(*arguments, "--json")
    return done.exit_code, json.loads(done.stdout)


def test_healthy_record_exits_0_and_prints_the_distance_of_both_sides(record):
    code, found = facts(record)
    assert (code, found["verdict"], [cause["id"] for cause in found["causes"]]) == (0, "healthy", ["R35"])
    assert found["num_tokens"] == 24 * 50
    assert 0.001 < found["metrics"]["mean_abs"] < 0.01
    assert found["steps"] == [0]
    assert all(identity["holds"] for identity in found["identities"])
    assert "NeMo-RL: gen_kl_error" in found["names_elsewhere"]["k3"]


def test_report_puts_the_verdict_first_and_the_worst_tokens_last(record):
    done = run(record)
    assert done.exit_code == 0
    assert done.stdout.startswith("Healthy: ordinary noise of bfloat16, dense. 1,200 tokens of 24 sequences")
    for text in (
        "refuted if",
        "mean |D|",
        "tokens by D (log)",
        "|D| by position in the response",
        "Worst tokens",
    ):
        assert text in done.stdout


def test_truncated_engine_exits_1_and_names_option_and_value(model, tmp_path):
    transform = functools.partial(transforms.top_p, top_p=0.8)
    record = write_record(tmp_path / "record", model, draws=transform, reports=transform)
    code, found = facts(record)
    assert (code, found["verdict"]) == (1, "mismatch")
    first = found["causes"][0]
    assert set(first) == {"id", "name", "confidence", "evidence", "refute", "fix", "fault"}
    assert first["id"] == "R03"
    assert "replaying top_p 0.8 " in first["evidence"]
    assert run(record).stdout.startswith("Mismatch: top_p renormalises the engine's logprobs.")


def test_stale_engine_is_unknown_until_the_previous_checkpoint_is_given(record, model, tmp_path):
    newer = save_model(tmp_path / "newer", seed=9)
    code, found = facts(record, "--model", newer)
    assert (code, found["verdict"]) in ((2, "unknown"), (1, "mismatch"))
    assert "R24" not in [cause["id"] for cause in found["causes"]]
    code, found = facts(record, "--model", newer, "--previous", model)
    assert (code, found["causes"][0]["id"]) == (1, "R24")


def test_failed_gate_exits_1_though_the_verdict_is_healthy(record):
    done = run(record, "--gate", "mean_abs=0.02,max_abs=0.0001")
    assert done.exit_code == 1
    assert "gate max_abs <= 0.0001" in done.stdout
    assert run(record, "--gate", "mean_abs=0.02").exit_code == 0


@pytest.mark.parametrize(
    ("gate", "sentence"),
    [("meanabs=1", "there is no metric 'meanabs'"), ("k3=much", "'much' is not a number; write k3=0.02")],
)
def test_gate_that_cannot_be_checked_is_one_sentence(record, gate, sentence):
    done = run(record, "--gate", gate)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_run_that_did_not_sample_is_refused_in_one_sentence(tmp_path):
    from recorder.testing import write_scripted_record

    write_scripted_record(tmp_path / "record", num_steps=1)
    done = run(tmp_path / "record")
    assert done.exit_code == 2
    assert "its config has no 'gconfig'" in done.stderr


def test_first_weights_are_not_compared_with_later_steps(model, tmp_path):
    record = write_record(tmp_path / "record", model, num_steps=2, updated=True)
    done = run(record, "--step", 1)
    assert done.exit_code == 2
    assert f"step 1 was sampled with weights of version 1, and {model} has those of version 0" in done.output
    assert facts(record)[0] == 0
    assert facts(record, "--step", 1, "--model", model)[0] == 0
