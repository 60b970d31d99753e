"""A record and its replay, on the command line, on real ranks."""

import json
import os
import re
import shutil

import pytest

from areal_core.testing import make_tiny_model
from areal_debug.replay.ranks import report_of_ranks
from recorder import open_record
from tests.forks import COMMAND, run_anew, run_forked


def checksums(record):
    return [record.step(step).outcome(0).checksums for step in record.steps]


def assert_one_sentence(done, code, *words):
    """Assert that the command ended with `code` and one sentence, without a traceback."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    # A rank's output comes through the pipe of its launcher.
    errors = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, done.stdout + done.stderr
    for word in words:
        assert str(word) in errors[0]


# A new interpreter imports all again, in each of its processes.
@pytest.mark.parametrize("run", [run_forked, pytest.param(run_anew, marks=pytest.mark.long)])
def test_replay_gives_the_recorded_bits(recorded, run):
    done = run([COMMAND, "replay", str(recorded), "--json"])
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["identical"] is True
    assert [step["step"] for step in report["steps"]] == [0, 1, 2]
    assert all(step["num_parameters"] == 20 for step in report["steps"])
    # The run changed its weights, so that equality is meaningful.
    assert all(step["grad_norm"] > 0.01 for step in report["steps"])
    weights = checksums(open_record(recorded))
    assert weights[0] != weights[1] != weights[2]


@pytest.mark.long
def test_two_ranks_replay_to_the_same_bits_without_sglang_and_from_step_one(areal_debug, train, tmp_path):
    done = train("--dump-rollout", tmp_path / "two", "allocation_mode=embedded|fsdp:d2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2 (3 of 3)" in done.stdout
    shadow = tmp_path / "shadow" / "sglang"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise ImportError('sglang must not be imported')")
    done = areal_debug("replay", tmp_path / "two", "--from-step", 1, PYTHONPATH=str(shadow.parent))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Bit-identical: 2 of 2 steps" in done.stdout
    assert not re.search(r"step +0", done.stdout)


@pytest.mark.long
def test_a_killed_run_replays_up_to_the_step_that_was_cut_off(areal_debug, train, tmp_path):
    killed = train("--dump-rollout", tmp_path / "record", "debug.dump_queue_steps=0", KILL_IN_STEP="2")
    assert killed.returncode == 137
    done = areal_debug("replay", tmp_path / "record")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Bit-identical: 2 of 2 steps" in done.stdout


def test_recording_over_a_record_is_refused(train, copied):
    assert_one_sentence(train("--dump-rollout", copied), 2, "already holds a record")


@pytest.mark.long
def test_anchor_zero_replaces_missing_weights(areal_debug, train, tmp_path, tiny_model):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    done = train(
        *("--dump-rollout", tmp_path / "record", f"actor.path={model}"),
        *("debug.save_initial_weights=true", "total_train_steps=2"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    make_tiny_model(model, seed=5)  # other weights, same shape
    done = areal_debug("replay", tmp_path / "record")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Bit-identical: 2 of 2 steps" in done.stdout


def test_ctrl_c_while_a_rank_still_writes_is_an_interruption(monkeypatch):
    """A rank makes a file in the temporary folder while it is removed."""
    remove = os.rmdir

    class Interrupted:
        def run(self, task, num_ranks, environment, log):
            def rmdir(path, **given):
                (log.parent / "late").touch()
                remove(path, **given)

            monkeypatch.setattr(os, "rmdir", rmdir)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report_of_ranks(Interrupted(), [], 1)
