"""Records of other trainers through the recording API: values as given, unknown ones unknown."""

import argparse
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_debug import Recorder
from recorder import RecordError, open_record, verify
from recorder.testing import gatherers
from tests.exports.given import FULL_SAMPLE
from tests.forks import run_forked
from tests.recorder.ranks import on_ranks

FULL = FULL_SAMPLE | {
    "prompt": "2+2=",
    "extras": {"routed_experts": np.arange(10, dtype=np.int32).reshape(5, 2)},
    "scores": {"format": 0.5, "length": None},
}
BARE = {"tokens": [1, 2, 3, 4]}


def test_values_are_recorded_as_they_are_given(tmp_path, capsys, recwarn):
    stats = {"loss": torch.tensor(0.5, requires_grad=True), "note": "x", "each": np.ones(3)}
    with Recorder(tmp_path / "r", config={"lr": 1e-6}, trainer="mine", trainer_version="7") as recorder:
        recorder.step(3, [FULL, FULL], version=5, stats=stats, checksums={"w": "0000abcd"})
        recorder.step(4, [], stats=stats)
    said = "recording: stats that are not one number: left out each, note\n"
    assert (capsys.readouterr().err, recwarn.list) == (said, [])
    record = open_record(tmp_path / "r")
    assert record.steps == (3, 4)
    assert record.header.config == {"lr": 1e-6}
    assert record.header.trainer == "mine"
    assert record.header.environment["trainer"] == {"name": "mine", "version": "7"}
    step = record.step(3)
    batch = step.batch(0)
    assert batch["input_ids"].tolist() == [5, 6, 7, 8, 9] * 2
    assert batch["loss_mask"].tolist() == [0, 0, 1, 0, 1] * 2
    assert batch["logprobs"].tolist() == [0, 0, -0.5, -9, -1.5] * 2
    assert batch["versions"].tolist() == [-1, -1, 3, -1, 3] * 2
    assert batch["rewards"].tolist() == [1, 1]
    assert batch["prompt_id"].tolist() == [0, 0]
    assert batch["sample_id"].tolist() == [0, 1]
    assert batch["finish_reason"].tolist() == [1, 1]
    assert batch["prompt_length"].tolist() == [2, 2]
    assert batch["routed_experts"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]] * 2
    assert batch["scores.format"].tolist() == [0.5, 0.5]
    assert np.isnan(batch["scores.length"]).all()
    assert batch["unknown"].tolist() == [0, 0]
    learning = step.learning(0)
    assert learning["advantages"].tolist() == [0, 0.75, 0.75, 0.75, 0] * 2
    assert learning["prox_logp"].tolist() == [0, -0.25, -8.0, -1.25, 0] * 2
    assert step.outcome(0).stats == {"loss": 0.5}
    assert step.outcome(0).checksums == {"w": "0000abcd"}
    assert step.outcome(0).version == step.manifest.version == 5
    assert step.text(0)[0] == {"row": 0, "prompt": "2+2=", "completion": "4", "reward": 1.0}
    report = verify(tmp_path / "r")
    assert report.intact
    assert report.end.finished


def test_a_copy_of_the_engines_logprobs_is_not_the_trainers_own(tmp_path):
    with Recorder(tmp_path / "r") as recorder:
        recorder.step(0, [FULL | {"old_logprobs": FULL["logprobs"]}])
        recorder.step(1, [FULL, FULL | {"old_logprobs": FULL["logprobs"]}])
        recorder.step(2, [BARE])
    copied, own, without = map(open_record(tmp_path / "r").step, range(3))
    assert copied.trainer_logprobs(0) is None
    assert own.trainer_logprobs(0).tolist() == own.learning(0)["prox_logp"].tolist()
    assert without.trainer_logprobs(0) is None


def test_what_is_not_given_is_unknown(tmp_path):
    text_only = {"prompt": "p", "completion": "c"}
    with Recorder(tmp_path / "r") as recorder:
        recorder.step(0, [BARE, FULL, text_only])
    step = open_record(tmp_path / "r").step(0)
    batch = step.batch(0)
    unknown = {
        "input_ids": [True, True, False],
        "loss_mask": [False, True, False],
        "logprobs": [False, True, False],
        "versions": [False, True, False],
        "rewards": [False, True, False],
        "prompt_id": [False, True, False],
        "finish_reason": [False, True, False],
        "prompt_length": [False, True, False],
        "sample_id": [True, True, True],
        "turns": [False, False, False],
    }
    assert {key: step.known(0, key).tolist() for key in unknown} == unknown
    assert np.isnan(batch["logprobs"][:4]).all()
    assert np.isnan(batch["rewards"][[0, 2]]).all()
    assert batch["versions"][:4].tolist() == [-1] * 4
    assert batch["prompt_id"].tolist() == [0, 1, 2]
    assert batch["routed_experts"][:4].tolist() == [[-1, -1]] * 4
    learning = step.learning(0)["advantages"]
    assert np.isnan(learning[:3]).all()
    assert [line["reward"] for line in step.text(0)] == [None, 1.0, None]
    assert verify(tmp_path / "r").intact


WRONG = {
    "is list": ([1, 2], "give a dict or a Sample"),
    "unknown member": ({**FULL, "rewards": 1}, "has 'rewards'; a sample may have tokens,"),
    "length": ({**FULL, "logprobs": [1.0] * 4}, "logprobs has 4 values: give 5 or 3"),
    "one of two": ({"prompt_tokens": [1]}, "prompt_tokens or completion_tokens alone"),
    "nothing": ({"reward": 1}, "neither tokens nor text"),
    "floats": ({"tokens": [1.5]}, "float64 instead of integers"),
    "negative": ({"tokens": [-1]}, "ids from -1 to -1"),
    "two dimensions": ({"tokens": [[1]]}, "one dimension expected"),
    "reward": ({**FULL, "reward": "good"}, "reward is 'good': give a number, or None if unknown"),
    "reason": ({**FULL, "finish_reason": "bored"}, "finish reason 'bored', known are stop"),
    "text": ({"prompt": "p"}, "give both as text"),
    "group": ({**FULL, "group": []}, "the group is a list"),
    "prompt length": ({"tokens": [1], "prompt_length": 2}, "prompt_length is 2, and there are 1 tokens"),
    "reserved": ({**FULL, "extras": {"input_ids": [1] * 5}}, "extras may not have 'input_ids'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_recorded_is_refused_and_nothing_is_written(tmp_path, name):
    sample, sentence = WRONG[name]
    with Recorder(tmp_path / "r") as recorder:
        with pytest.raises(RecordError, match="step 0, sample 1") as refused:
            recorder.step(0, [BARE, sample])
        assert sentence in str(refused.value)
        recorder.step(0, [BARE])
    assert open_record(tmp_path / "r").steps == (0,)


OTHER_KINDS = [{**BARE, "extras": {"weight": [1.0] * 4}}, {**BARE, "extras": {"weight": [[1.0, 2.0]] * 4}}]


def test_a_record_without_a_step_does_not_stand_in_the_way(tmp_path):
    for error in (KeyError, None):
        with pytest.raises(error) if error else nullcontext(), Recorder(tmp_path / "r") as recorder:
            if error:
                raise error
            recorder.step(0, [FULL])
    with pytest.raises(RecordError, match="already holds a record"), Recorder(tmp_path / "r") as recorder:
        recorder.step(0, [FULL])


def test_steps_ascend_and_end(tmp_path):
    recorder = Recorder(tmp_path / "r")
    recorder.step(10, [BARE])
    recorder.step(20, [BARE])
    with pytest.raises(RecordError, match="step 20 comes after step 20"):
        recorder.step(20, [BARE])
    recorder.end()
    with pytest.raises(RecordError, match="after the end"):
        recorder.step(30, [BARE])
    report = verify(tmp_path / "r")
    assert report.intact
    assert report.steps_ok == (10, 20)
    assert report.steps_missing == ()
    (tmp_path / "r/steps/000010/step.json").unlink()
    assert not verify(tmp_path / "r").intact


def test_prompts_never_repeat_between_steps_and_resumed_runs(tmp_path):
    pair = [{**BARE, "group": 0}, {**BARE, "group": 0}, {**BARE, "group": 1}]
    with Recorder(tmp_path / "r") as recorder:
        for step in range(3):
            recorder.step(step, pair)
    with Recorder(tmp_path / "r", resume=True) as recorder:
        recorder.step(2, pair)
    record = open_record(tmp_path / "r")
    ids = [record.step(step).batch(0)["prompt_id"].tolist() for step in record.steps]
    assert ids == [[0, 0, 1], [2, 2, 3], [4, 4, 5]]
    assert verify(tmp_path / "r").intact


@pytest.mark.parametrize("wrong", [[{"tokens": [-1]}], OTHER_KINDS])
def test_a_rank_that_cannot_record_ends_the_recording_on_all(tmp_path, capsys, wrong):
    gathers = gatherers(2)

    def run(rank):
        options = {"rank": rank, "num_ranks": 2, "gather": gathers[rank], "when_failing": "continue"}
        with Recorder(tmp_path / "r", **options) as recorder:
            recorder.step(0, [BARE])
            recorder.step(1, [BARE] if rank else wrong)
            recorder.step(2, [BARE])

    assert on_ranks(2, run) == [None, None]
    assert open_record(tmp_path / "r").steps == (0,)
    assert capsys.readouterr().err.count("the run continues without recording") == 1


def test_each_rank_gives_its_own_samples(tmp_path):
    gathers = gatherers(2)

    def run(rank):
        with Recorder(tmp_path / "r", rank=rank, num_ranks=2, gather=gathers[rank]) as recorder:
            recorder.step(0, [{**BARE, "reward": rank, "group": 0}])
            recorder.step(1, [{**BARE, "reward": rank, "group": 0}])

    assert on_ranks(2, run) == [None, None]
    record = open_record(tmp_path / "r")
    rows = [(s, r, record.step(s).batch(r)) for s in record.steps for r in range(2)]
    columns = ("rewards", "prompt_id", "sample_id")
    assert [(s, r, *(b[name].tolist() for name in columns)) for s, r, b in rows] == [
        (0, 0, [0], [0], [0]),
        (0, 1, [1], [0], [1]),
        (1, 0, [0], [1], [0]),
        (1, 1, [1], [1], [1]),
    ]
    assert verify(tmp_path / "r").intact


def test_config_is_plain_and_without_credentials(tmp_path):
    options = argparse.Namespace(
        lr=1e-6, path=Path("x"), inner={"api_key": "sk-1234567890abcdef1234"}, t=(1, 2)
    )
    Recorder(tmp_path / "r", config=options).end()
    assert open_record(tmp_path / "r").header.config == {
        "lr": 1e-6,
        "path": "x",
        "inner": {"api_key": "***"},
        "t": [1, 2],
    }
    with pytest.raises(RecordError, match="the config is int"):
        Recorder(tmp_path / "other", config=3)


def test_a_process_without_end_loses_no_step(tmp_path):
    with Recorder(tmp_path / "r") as recorder:
        recorder.step(0, [BARE])
        recorder.step(1, [BARE])
    program = f"""
from areal_debug import Recorder
recorder = Recorder({str(tmp_path / "r")!r}, resume=True)
for step in range(1, 5):
    recorder.step(step, [{{"tokens": list(range(1000))}}] * 8)
"""
    (tmp_path / "program.py").write_text(program)
    assert run_forked([str(tmp_path / "program.py")]).returncode == 0
    report = verify(tmp_path / "r")
    assert report.intact
    assert report.steps_ok == (0, 1, 2, 3, 4)
    assert not report.end.finished
