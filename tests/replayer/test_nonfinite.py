"""A planted value that is not finite stops the run and is named; a skipped update replays."""

import logging
import math
from pathlib import Path

import pytest
import torch

from areal_core.errors import NonFiniteError
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import recorder_of
from recorder import RecordingOptions, open_record
from replayer.request import Request
from replayer.run import replay_and_compare

from . import nonfinite_program as program
from .conftest import EditedRollouts, tiny_config
from .nonfinite_program import MARKED, break_gradient, break_output

LONG = pytest.mark.long
PROGRAM = Path(__file__).parent / "nonfinite_program.py"
STEP, ROW = 1, 9


def mark(batch, step):
    if step != STEP:
        return batch
    ids = batch["input_ids"].clone()
    ids[ROW, 0] = MARKED
    return batch | {"input_ids": ids}


def change(name, value):
    def edit(batch, step):
        if step != STEP:
            return batch
        column = batch[name].clone()
        column[ROW] = torch.where(batch["loss_mask"][ROW] > 0, value, 0.0) if column.dim() == 2 else value
        return batch | {name: column}

    return edit


def run(config, folder=None, edit=lambda batch, step: batch, plant=lambda trainer: None):
    """Train, recording into `folder` if there is one; return the statistics of each step."""
    found = []

    def observe(trainer):
        plant(trainer)
        return lambda event, **facts: found.append(facts["stats"]) if event == "step" else None

    observers = [observe]
    if folder is not None:
        config.debug.dump_rollout_data, config.debug.path = True, str(folder)
        observers.append(lambda trainer: recorder_of(trainer, folder, RecordingOptions(text=True)))
    source = EditedRollouts(edit, MARKED)
    with PPOTrainer(
        config, source=lambda trainer: source, observers=observers, total_steps=3, print_steps=False
    ) as trainer:
        trainer.train()
    return found


def embedding_hook(hook):
    return lambda trainer: trainer.actor.model.get_input_embeddings().register_forward_hook(hook)


@pytest.mark.parametrize(
    ("what", "edit", "plant"),
    [
        pytest.param("reward", change("rewards", math.nan), None, marks=LONG),
        pytest.param("log-prob (logprobs)", change("logprobs", -math.inf), None, marks=LONG),
        pytest.param("log-prob of the current weights", mark, break_output, marks=LONG),
        ("gradient of model.embed_tokens.weight", mark, break_gradient),
    ],
)
def test_a_planted_value_is_named_with_its_row(tmp_path, tiny_model, what, edit, plant):
    # without recomputed log-probs, the first forward pass is that of the update
    config = tiny_config(tmp_path, tiny_model, 3, actor__use_decoupled_loss=False)
    with pytest.raises(NonFiniteError) as raised:
        run(config, edit=edit, plant=embedding_hook(plant) if plant else lambda trainer: None)
    first, second, *others = str(raised.value).splitlines()
    assert first.startswith(f"step {STEP}, actor, minibatch ")
    least = "at least " if what.startswith("gradient") else ""
    assert first.endswith(f": the {what} is not finite in {least}1 row:")
    assert second.startswith(f"    rank 0, row {ROW}, prompt 2, sample 1: '")
    assert others == ["actor.nonfinite=skip continues without such updates"]


@pytest.mark.parametrize(
    ("hook", "found"),
    [
        pytest.param(
            break_output, "actor, minibatch 0: the value (values) is not finite in 1 row", marks=LONG
        ),
        pytest.param(
            break_gradient,
            "critic, minibatch 0: the gradient of model.embed_tokens.weight is not finite in at least 1",
            marks=LONG,
        ),
    ],
)
def test_a_critic_is_judged_as_the_actor_is(tmp_path, tiny_model, hook, found):
    critic = {"path": str(tiny_model), "dtype": "float32", "optimizer": {"lr": 1e-3}, "ppo_n_minibatches": 1}
    config = tiny_config(tmp_path, tiny_model, 3, critic=critic)
    with pytest.raises(NonFiniteError) as raised:
        run(
            config,
            edit=mark,
            plant=lambda trainer: trainer.critic.model.get_input_embeddings().register_forward_hook(hook),
        )
    assert found in str(raised.value)
    assert f"    rank 0, row {ROW}, prompt 2, sample 1: " in str(raised.value)


def test_a_weight_is_named_before_the_first_step_and_after_an_update(tmp_path, tiny_model):
    def break_weight(trainer):
        parameter = dict(trainer.actor.model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
        with torch.no_grad():
            parameter.to_local()[0, 0] = math.nan

    config = tiny_config(tmp_path, tiny_model, 3)
    with pytest.raises(NonFiniteError) as raised:
        run(config, plant=break_weight)
    expected = "before the first step, actor: the weight model.layers.1.mlp.up_proj.weight is not finite"
    assert str(raised.value) == expected
    config.actor.optimizer.lr = math.inf
    with pytest.raises(
        NonFiniteError, match=r"step 0, .*: the weight model.embed_tokens.weight \(and \d+ more\)"
    ):
        run(config)


def test_skipped_updates_leave_the_weights_and_replay_to_the_same_bits(tmp_path, tiny_model, caplog):
    config = tiny_config(tmp_path, tiny_model, 3, actor__nonfinite="skip")
    with caplog.at_level(logging.WARNING):
        stats = run(config, tmp_path / "record", change("rewards", math.nan))
    assert [step["ppo_actor/update/update_successful"] for step in stats] == [1.0, 0.0, 1.0]
    skipped = [text for text in caplog.messages if "skipped this update" in text]
    assert [text.splitlines()[0][:27] for text in skipped] == [
        f"step {STEP}, actor, minibatch {number}:" for number in range(2)
    ]
    assert skipped[1].endswith("skipped this update, number 2 of at most 10")
    record = open_record(tmp_path / "record")
    weights = [record.step(step).outcome(0).checksums for step in record.steps]
    assert weights[0] == weights[1] != weights[2]
    assert replay_and_compare(Request(str(record.path), 0, 2)).identical


@pytest.mark.long
@pytest.mark.parametrize(
    ("allocation", "broken", "found"),
    [
        ("d2", "gradient", "the gradient of model.embed_tokens.weight is not finite in at least 1 row:"),
        ("c2", "log-prob", "the log-prob of the current weights is not finite in 1 row:"),
    ],
)
def test_both_of_two_ranks_stop_with_the_row_of_the_one_that_has_it(
    tmp_path, tiny_model, torchrun, allocation, broken, found
):
    messages = torchrun(PROGRAM, 2, tmp_path, tiny_model, allocation, broken)
    assert messages[0] == messages[1]
    first, second, *_ = messages[0].splitlines()
    assert first.endswith(found)
    assert second.startswith(f"    rank {1 if allocation == 'd2' else 0}, row 3, prompt ")


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("sft", "log-prob of the current weights is not finite in 1 row"),
        pytest.param("rw", "score of the current weights is not finite in 1 row", marks=LONG),
    ],
)
def test_a_supervised_run_stops_and_names_the_row(tmp_path, tiny_model, method, what):
    message = program.train_supervised(tmp_path, tiny_model, method)
    first, second, *_ = message.splitlines()
    assert first == f"step 2, actor, minibatch 0: the {what}:"
    assert second == f"    rank 0, row 0, row 4 of the run: {program.TEXT!r}"
