"""A record and its replay, on the command line, on real ranks."""

import json
import re
import shutil
from pathlib import Path

import pytest

from areal_core.testing import make_tiny_model
from hangdoctor.heartbeat import read_beats
from recorder import open_record
from recorder.documents import checksummed_bytes, parse_checksummed
from tests.forks import COMMAND, run_anew

HERE = Path(__file__).parent
SCRIPT, CONFIG = HERE / "train_tiny.py", HERE / "tiny.yaml"


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


def test_replay_gives_the_recorded_bits(recorded):
    done = run_anew([COMMAND, "replay", str(recorded), "--json"])
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
def test_two_recordings_of_one_seed_are_equal_and_another_seed_differs(train, recorded, tmp_path):
    for name, seed in (("same", 1), ("other", 2)):
        done = train("--dump-rollout", tmp_path / name, f"seed={seed}", "total_train_steps=2")
        assert done.returncode == 0, done.stdout + done.stderr
    first, same, other = (open_record(path) for path in (recorded, tmp_path / "same", tmp_path / "other"))
    assert checksums(same) == checksums(first)[:2]
    assert checksums(other)[0] != checksums(first)[0]
    ours, theirs = (record.step(1).outcome(0).micro_batches for record in (same, first))
    assert ours == theirs
    assert len(ours) > 2


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
def test_a_changed_learning_rate_is_reported_before_the_numbers_that_follow(train, recorded):
    done = train("--replay-rollout", recorded, "actor.optimizer.lr=2e-3")
    assert done.returncode == 1, done.stdout + done.stderr
    out = done.stdout
    assert out.index("actor.optimizer.lr") < out.index("step    0")
    assert re.search(r"actor\.optimizer\.lr +0\.001 +0\.002", out)
    assert "Weights diverge at step 0: 3 of 3 steps have other numbers, the first is step 0 (" in out
    # the first step of the learning rate is after the gradients, which are the recorded ones
    assert re.search(r"first +step 0, stage weights: lr, minibatch 0: 0\.001 recorded, 0\.002 replayed", out)


@pytest.mark.long
def test_another_library_version_is_reported(areal_debug, copied):
    file = copied / "record.json"
    header = parse_checksummed(file.read_bytes(), "record.json")
    header["environment"]["libraries"]["transformers"] = "4.0.0"
    file.write_bytes(checksummed_bytes(header))
    done = areal_debug("replay", copied)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"transformers +4\.0\.0 +\d", done.stdout)


def test_one_changed_bit_is_named_by_replay(areal_debug, copied):
    file = next((copied / "steps" / "000001").glob("batch-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 16
    file.write_bytes(content)
    assert_one_sentence(areal_debug("replay", copied), 1, file.name, "tensor")


@pytest.mark.long
def test_a_killed_run_replays_up_to_the_step_that_was_cut_off(areal_debug, train, tmp_path):
    killed = train("--dump-rollout", tmp_path / "record", "debug.dump_queue_steps=0", KILL_IN_STEP="2")
    assert killed.returncode == 137
    done = areal_debug("replay", tmp_path / "record")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Bit-identical: 2 of 2 steps" in done.stdout


def test_recording_over_a_record_is_refused_unless_requested(train, copied):
    assert_one_sentence(train("--dump-rollout", copied), 2, "already holds a record")
    done = train("--dump-rollout", copied, "debug.overwrite=true", "total_train_steps=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert open_record(copied).steps == (0,)


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


def test_wrong_input_of_replay_is_one_sentence(areal_debug, recorded, copied, tmp_path):
    assert_one_sentence(areal_debug("replay", tmp_path / "missing"), 2, "missing")
    (tmp_path / "empty").mkdir()
    assert_one_sentence(areal_debug("replay", tmp_path / "empty"), 2, "record.json")
    assert_one_sentence(areal_debug("replay", recorded, "--to-step", 9), 2, "9", "0 to 2")
    other = make_tiny_model(tmp_path / "model", seed=9)
    assert_one_sentence(areal_debug("replay", recorded, "--model", other), 2, "model.safetensors", "--model")
    header = parse_checksummed((copied / "record.json").read_bytes(), "record.json")
    (copied / "record.json").write_bytes(checksummed_bytes(header | {"format_version": 99}))
    assert_one_sentence(areal_debug("replay", copied), 2, "99")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["actor.path=/no/model"], ["/no/model"]),
        pytest.param(["allocation_mode=fsdp:d1"], ["fsdp:d1", "embedded|"], marks=pytest.mark.long),
        (["--dump-rollout=a", "--replay-rollout=b"], ["--dump-rollout", "--replay-rollout"]),
    ],
)
def test_wrong_input_of_train_is_one_sentence(train, arguments, words):
    assert_one_sentence(train(*arguments), 2, *words)


def test_an_unknown_script_names_the_examples(areal_debug):
    assert_one_sentence(areal_debug("train", "gsm8k_grop"), 2, "gsm8k_grop", "gsm8k_grpo")


@pytest.mark.long
def test_a_watched_run_writes_a_heartbeat_once_a_step_and_reports_its_end(areal_debug, tiny_model, tmp_path):
    options = (f"cluster.fileroot={tmp_path}", f"actor.path={tiny_model}", "total_train_steps=2")
    done = areal_debug("train", SCRIPT, "--config", CONFIG, "--watch", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.glob("logs/*/tiny/test/watch-*/beats")
    beat = read_beats(folder)["rank_0"]
    assert (beat.step, beat.done) == (2, True)
