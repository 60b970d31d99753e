"""areal_debug.slime.record, called as slime and miles call it."""

from argparse import Namespace

import numpy as np
import pytest

from recorder import open_record, verify
from recorder.trainers import slime

from .stand_ins import log_rollout_data, slime_sample

PATH = "areal_debug.slime.record"
EXPERTS = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_DEBUG_RECORD", str(tmp_path / "r"))
    slime.recording_of.cache_clear()
    yield tmp_path / "r"
    slime.recording_of("slime").end()
    slime.recording_of.cache_clear()


def arguments(**options):
    return Namespace(custom_rollout_log_function_path=PATH, reward_key=None, lr=1e-6, **options)


def full(**members):
    return slime_sample(
        **{
            "status": "truncated",
            "group_index": 7,
            "prompt": "2+2=",
            "tokens": [5, 6, 7, 8, 9],
            "response": "4 !",
            "response_length": 3,
            "reward": 0.5,
            "loss_mask": [1, 0, 1],
            "rollout_log_probs": [-0.5, 0.0, -1.5],
            "weight_versions": ["3", "3"],
            "teacher_log_probs": [-0.25, -0.5, -0.75],
            "rollout_routed_experts": EXPERTS,
        }
        | members
    )


def bare(**members):
    """What a sample has at least: no log-probs, reward, mask, version or group."""
    return slime_sample(**{"status": "pending", "tokens": [1, 2, 3], "response_length": 2} | members)


def test_every_value_of_two_rollouts_is_recorded(folder):
    args = arguments()
    keeps_default_log = log_rollout_data(
        args, 0, [[full(), full(reward=1.0)], [bare()]], {"filtered": 2}, 1.5
    )
    log_rollout_data(args, 1, [full(group_index=8, status="completed")], None, 2.5)
    slime.recording_of("slime").end()
    assert keeps_default_log
    record = open_record(folder)
    assert record.steps == (0, 1)
    assert record.header.trainer == "slime"
    assert record.header.config["lr"] == 1e-6
    step = record.step(0)
    batch = step.batch(0)
    assert batch["cu_seqlens"].tolist() == [0, 5, 10, 13]
    assert batch["input_ids"].tolist() == [5, 6, 7, 8, 9] * 2 + [1, 2, 3]
    assert batch["loss_mask"].tolist() == [0, 0, 1, 0, 1] * 2 + [0, 1, 1]
    assert batch["logprobs"][:10].tolist() == [0, 0, -0.5, 0, -1.5] * 2
    assert batch["versions"].tolist() == [-1, -1, 3, -1, 3] * 2 + [-1, -1, -1]
    assert batch["rewards"][:2].tolist() == [0.5, 1.0]
    assert batch["prompt_id"].tolist() == [0, 0, 1]
    assert batch["finish_reason"].tolist() == [1, 1, 0]
    assert batch["prompt_length"].tolist() == [2, 2, 1]
    experts = batch["routed_experts"]
    assert experts[:4].tolist() == EXPERTS.tolist()
    assert (experts[4] == 255).all(), "the last token was never an input"
    assert step.learning(0)["teacher_logp"][:4].tolist() == [0, -0.25, -0.5, -0.75]
    assert step.outcome(0).stats == {"filtered": 2.0, "rollout_time": 1.5}
    assert step.text(0)[0]["prompt"] == "2+2="
    assert step.text(0)[0]["completion"] == "4 !"
    second = record.step(1).batch(0)
    assert second["prompt_id"].tolist() == [2]
    assert second["finish_reason"].tolist() == [0]
    assert verify(folder).intact
    assert verify(folder).end.finished


def test_what_a_sample_lacks_is_unknown(folder):
    log_rollout_data(arguments(), 0, [bare(), full(weight_versions=["3", "4"])], None, 1.0)
    slime.recording_of("slime").end()
    step = open_record(folder).step(0)
    names = ("logprobs", "versions", "rewards", "prompt_id", "finish_reason")
    assert {name: step.known(0, name).tolist() for name in names} == {
        "logprobs": [False, True],
        "versions": [False, False],  # two versions, and nothing says where the second begins
        "rewards": [False, True],
        "prompt_id": [False, True],
        "finish_reason": [False, True],
    }
    batch = step.batch(0)
    assert np.isnan(batch["logprobs"][1:3]).all()
    assert np.isnan(batch["rewards"][0])
    assert (batch["routed_experts"][:3] == 255).all()
    assert np.isnan(step.learning(0)["teacher_logp"][:2]).all()


def test_finish_reasons_removed_samples_and_named_rewards(folder):
    args = arguments()
    args.reward_key = "score"
    rows = [
        full(
            reward={"score": 0.25, "format": 1.0, "kind": "math"},
            status=status,
            remove_sample=status == "failed",
        )
        for status in ("completed", "truncated", "aborted", "failed")
    ]
    log_rollout_data(args, 0, rows, None, 1.0)
    slime.recording_of("slime").end()
    batch = open_record(folder).step(0).batch(0)
    assert batch["finish_reason"].tolist() == [0, 1, 2, 2]
    assert batch["rewards"].tolist() == [0.25] * 4
    assert batch["scores.format"].tolist() == [1.0] * 4
    assert np.isnan(batch["scores.kind"]).all()
    assert batch["loss_mask"].reshape(4, 5).sum(axis=1).tolist() == [2, 2, 2, 0]
