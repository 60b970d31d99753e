"""areal_debug.nemo_rl.Recorded, called as NeMo-RL's GRPO loop calls its logger."""

import pytest

from areal_debug.nemo_rl import Recorded
from recorder import open_record, verify

from .stand_ins import NemoLogger

CONFIG = {"grpo": {"num_prompts_per_step": 2}}


@pytest.fixture
def logger(tmp_path):
    return NemoLogger({"log_dir": str(tmp_path / "logs")})


def columns(**others):
    """What `grpo_train` logs: lists that are padded to the longest row."""
    return {
        "content": [["2+2=", "4"], ["2+2=", "5"], ["3+3=", "6"]],
        "rewards": [1.0, 0.0, 0.5],
        "input_lengths": [4, 5, 3],
        "token_ids": [[5, 6, 7, 8, 0], [5, 6, 9, 8, 8], [4, 6, 3, 0, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 0], [0, 0, 1, 0, 1], [0, 0, 1, 0, 0]],
        "sample_loss_mask": [1.0, 1.0, 0.0],
        "advantages": [[0.5] * 5, [-0.5] * 5, [0.25] * 5],
        "generation_logprobs": [[0, 0, -0.5, -1.0, 0], [0, 0, -1.5, 0, -2.0], [0, 0, -2.5, 0, 0]],
        "prev_logprobs": [[0, 0, -0.25, -0.75, 0], [0, 0, -1.25, 0, -1.75], [0, 0, -2.25, 0, 0]],
    } | others


def train_step(logger, number, data, loss=0.125):
    """Log a step as `grpo_train` does: the data, then the metrics in three calls."""
    logger.log_metrics({"reward": 1.0}, number, prefix="train")  # of the rollout, before the data
    logger.log_batched_dict_as_jsonl(data, f"train_data_step{number}.jsonl")
    logger.log_metrics({"loss": loss, "grad_norm": 2.0, "plot": "x"}, number, prefix="train")
    logger.log_metrics({"total": 3.0}, number, prefix="timing/train", step_finished=True)


def test_every_value_of_two_steps_is_recorded_and_nothing_is_dumped(logger, tmp_path):
    recorded = Recorded(logger, tmp_path / "r", config=CONFIG)
    train_step(recorded, 1, columns())
    train_step(recorded, 2, columns(rewards=[0.0, 0.0, 1.0]), loss=0.25)
    recorded.finish()
    record = open_record(tmp_path / "r")
    assert record.steps == (0, 1)
    assert record.header.trainer == "nemo-rl"
    assert record.header.config == CONFIG
    step = record.step(0)
    batch, learning = step.batch(0), step.learning(0)
    assert batch["cu_seqlens"].tolist() == [0, 4, 9, 12]
    assert batch["input_ids"].tolist() == [5, 6, 7, 8, 5, 6, 9, 8, 8, 4, 6, 3]
    assert batch["loss_mask"].tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 0]
    assert batch["logprobs"].tolist() == [0, 0, -0.5, -1.0, 0, 0, -1.5, 0, -2.0, 0, 0, -2.5]
    assert batch["rewards"].tolist() == [1.0, 0.0, 0.5]
    assert batch["prompt_id"].tolist() == [0, 0, 1]
    assert batch["prompt_length"].tolist() == [2, 2, 2]
    assert learning["prox_logp"].tolist() == [0, -0.25, -0.75, 0, 0, -1.25, 0, -1.75, 0, 0, -2.25, 0]
    assert learning["advantages"].tolist() == [0.5] * 4 + [-0.5] * 5 + [0.25] * 3
    assert not any(step.known(0, name).any() for name in ("versions", "finish_reason"))
    assert step.outcome(0).stats == {"loss": 0.125, "grad_norm": 2.0}
    assert step.text(0)[0]["completion"] == '["2+2=", "4"]'
    assert record.step(1).batch(0)["rewards"].tolist() == [0.0, 0.0, 1.0]
    assert record.step(1).outcome(0).stats["loss"] == 0.25
    assert record.step(1).manifest.version == 2
    assert verify(tmp_path / "r").intact
    assert verify(tmp_path / "r").end.finished
    assert not (tmp_path / "logs").exists()


def test_dynamic_sampling_records_the_rewards_of_the_samples_trained_on(logger, tmp_path):
    recorded = Recorded(logger, tmp_path / "r")
    data = columns(rewards=[1.0, 1.0, 1.0, 0.0, 0.5], filtered_rewards=[1.0, 0.0, 0.5], agent_ref=["a"] * 3)
    train_step(recorded, 1, data)
    recorded.finish()
    step = open_record(tmp_path / "r").step(0)
    assert step.batch(0)["rewards"].tolist() == [1.0, 0.0, 0.5]
    assert step.plan(0).details == {"not_recorded": ["agent_ref"]}


def test_what_cannot_be_recorded_is_dumped(logger, tmp_path, capfd):
    recorded = Recorded(logger, tmp_path / "r")
    train_step(recorded, 1, columns())
    train_step(recorded, 2, columns(token_ids=[[1]]))
    train_step(recorded, 3, columns())
    recorded.finish()
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        "recording: nemo-rl: step 1 is not recorded: token_ids has 1 rows, input_lengths 3; "
        "the run continues without recording"
    )
    assert open_record(tmp_path / "r").steps == (0,)
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["train_data_step2.jsonl", "train_data_step3.jsonl"]
