"""Records of SkyRL's own trainer hold what it trained on, and nothing else."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from areal_debug.skyrl import Record
from recorder import open_record, verify

from .stand_ins import run_installed


def last(values: list, width: int, size: int) -> list:
    """[size] values: the last `width` of those given, zeros in front."""
    return [0] * (size - width) + values[len(values) - width :]


class Batch(dict):
    metadata: dict


def a_batch(**changes) -> Batch:
    """Two rows and a copy that pads: [2 3 | 5 6] and [4 | 7 8 9], on the right."""
    batch = Batch(
        sequences=torch.tensor([[2, 3, 5, 6], [4, 7, 8, 9], [2, 3, 5, 6]]),
        attention_mask=torch.ones(3, 4),
        response_mask=torch.tensor([[0, 1, 1], [1, 1, 1], [0, 1, 1]]),
        loss_mask=torch.tensor([[0, 1, 1], [1, 0, 1], [0, 0, 0]]).float(),
        rollout_logprobs=torch.tensor([[0, -1, -2], [-3, 0, -4], [0, 0, 0]]).float(),
        action_log_probs=torch.tensor([[-9, -1, -2], [-3, -9, -4], [0, 0, 0]]).float(),
        rewards=torch.tensor([[0, 0, 1], [0, 0, 0.5], [0, 0, 0]]).float(),
        advantages=torch.tensor([[0, 0.5, 0.5], [-0.5, 0, -0.5], [0, 0, 0]]),
    )
    batch |= changes
    batch.metadata = {"pad_size": 1}
    return batch


class Trainer:
    """RayPPOTrainer as a callback sees it."""

    cfg, tokenizer, all_metrics = {"lr": 1e-6}, None, {"policy/loss": 0.5}

    def convert_to_training_input(self, generator_output, uids):
        return a_batch(advantages=None)

    def compute_advantages_and_returns(self, data):
        return a_batch()


def train(callback: Record, step: int, batch: Batch) -> None:
    """One step, as the trainer fires its events."""
    trainer = Trainer()
    callback.on_train_start(trainer, None, None)
    callback.on_epoch_start(trainer, None, None)
    data = trainer.convert_to_training_input({"stop_reasons": ["stop", "later"]}, ["a", "a"])
    trainer.compute_advantages_and_returns(data)
    callback.on_step_end(trainer, SimpleNamespace(batch=batch, global_step=step, metrics={}), None)
    callback.on_train_end(trainer, None, None)


def test_a_step_has_the_rewards_groups_and_advantages_that_its_batch_has_lost(tmp_path):
    """The batch at the end has advantages that the loss has divided, and rows that pad."""
    record = tmp_path / "record"
    train(Record(record), 4, a_batch(rewards=None, advantages=torch.full((3, 3), 7.0)))
    assert verify(record).problems == ()
    step = open_record(record).step(4)
    batch, learning = step.batch(0), step.learning(0)
    assert batch["input_ids"].tolist() == [2, 3, 5, 6, 4, 7, 8, 9]
    assert batch["loss_mask"].tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    assert batch["logprobs"].tolist() == [0, 0, -1, -2, 0, -3, 0, -4]
    assert batch["prompt_length"].tolist() == [2, 1]
    assert batch["rewards"].tolist() == [1, 0.5]
    assert batch["prompt_id"].tolist() == [0, 0]
    assert step.known(0, "finish_reason").tolist() == [True, False]
    assert not step.known(0, "versions").any()
    assert learning["advantages"].tolist() == [0, 0.5, 0.5, 0, -0.5, 0, -0.5, 0]
    assert learning["prox_logp"].tolist() == [0, -1, -2, 0, -3, -9, -4, 0]
    assert (step.outcome(0).version, step.outcome(0).stats) == (4, {"policy/loss": 0.5})


def test_what_cannot_be_recorded_is_one_sentence_and_the_run_continues(tmp_path, capsys):
    """Whatever the batch has."""
    callback = Record(tmp_path / "r")
    wrong = a_batch(sequences=torch.tensor([[2, 3, 5, -6]] * 3))
    train(callback, 1, wrong)
    lines = capsys.readouterr().err.strip().splitlines()
    assert all("sample 0: token ids from -6 to 5" in line for line in lines)
    assert "the run continues without recording" in lines[0]


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--kl"]])
def test_two_steps_of_the_real_trainer_are_recorded_to_the_last_value(tmp_path, options):
    """RayPPOTrainer.train of SkyRL 0.4.0, with a penalty for the KL as well."""
    record = tmp_path / "record"
    seen, _ = run_installed("skyrl", str(record), *options, PYTHONPATH=str(Path(__file__).parents[2]))
    opened = open_record(record)
    assert opened.header.trainer == "skyrl"
    assert list(opened.steps) == [1, 2]
    assert verify(record).problems == ()
    assert json.loads((record / "end.json").read_text())["finished"] is True
    for step, truth in zip((1, 2), seen, strict=True):
        recorded = opened.step(step)
        batch, learning = recorded.batch(0), recorded.learning(0)
        offsets = batch["cu_seqlens"].tolist()
        assert (len(offsets) - 1, truth["pad_size"]) == (4, 2)
        assert truth["advantages"] != truth["scaled_advantages"]
        for row, (begin, end) in enumerate(pairwise(offsets)):
            prompt, response = truth["prompt_token_ids"][row], truth["response_ids"][row]
            size, width = end - begin, len(response)
            assert batch["input_ids"][begin:end].tolist() == prompt + response
            assert batch["prompt_length"][row] == len(prompt)
            assert batch["loss_mask"][begin:end].tolist() == last(truth["loss_masks"][row], width, size)
            assert batch["logprobs"][begin:end].tolist() == last(truth["rollout_logprobs"][row], width, size)
            assert batch["rewards"][row] == np.float32(truth["rewards"][row])
            for name, theirs in (
                ("advantages", "advantages"),
                ("returns", "returns"),
                ("prox_logp", "action_log_probs"),
            ):
                found = [0.0, *learning[name][begin : end - 1].tolist()]
                assert found == last(truth[theirs][row], width, size), name
            experts = truth["experts"][row]
            assert batch["routed_experts"][begin : end - 1].tolist() == experts
            assert (batch["routed_experts"][end - 1] == -1).all()  # of the last token there are none
        assert batch["prompt_id"][0] == batch["prompt_id"][1] != batch["prompt_id"][2]
        assert truth["stop_reasons"] == ["stop", "length", None, "other"]
        assert recorded.known(0, "finish_reason").tolist() == [True, True, False, False]
        assert batch["finish_reason"].tolist() == [0, 1, 0, 0]
        assert recorded.outcome(0).stats["policy/grad_norm"] == 1.5
