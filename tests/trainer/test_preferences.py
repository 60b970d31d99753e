"""Training on pairs: validation accuracy rises, pairs stay together, the saved model is correct."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from areal_core.config import DPOConfig, RWConfig, SFTConfig, check_config
from areal_core.config.train_engine import OptimizerConfig, TrainEngineConfig
from areal_core.engine.ranks import Ranks
from areal_core.errors import ConfigError
from areal_core.trainer import build, supervised
from areal_core.trainer.batches import pairs_to_batch
from areal_core.trainer.dpo import DPOTrainer
from areal_core.trainer.reward_model import RWTrainer
from benchmarks.larger_numbers import larger_number_rows
from benchmarks.learning_methods import pairs

ACCURACY = {"dpo": "reward_accuracy/avg", "rw": "correct_ratio/avg"}


TRAINING, HELD_OUT = map(pairs, larger_number_rows())


def make_config(method: str, folder, trial: str = "t"):
    """Build a config: batches of 32 pairs, float32, 3 epochs."""
    config = {"dpo": DPOConfig, "rw": RWConfig}[method](experiment_name="e", trial_name=trial)
    config.cluster.fileroot, config.allocation_mode = str(folder), "fsdp:d1"
    config.actor.path, config.actor.dtype = "model", "float32"
    config.actor.optimizer = OptimizerConfig(
        lr=3e-3, weight_decay=0.0, lr_scheduler_type="linear", warmup_steps_proportion=0.1
    )
    config.train_dataset.path, config.train_dataset.type, config.train_dataset.batch_size = "x", method, 32
    config.total_train_epochs = 3
    return config


@pytest.fixture
def trainer(tiny_model, ranks, tmp_path, monkeypatch):
    """Build a trainer in this process: `trainer(method, change, trial=...)`.

    `change` is called with the config.
    """
    monkeypatch.setattr(build, "start_process", lambda config: ranks)
    monkeypatch.setattr(supervised, "leave_ranks", lambda: None)

    def make(method: str, change=lambda config: None, trial: str = "t", valid=HELD_OUT):
        config = make_config(method, tmp_path, trial)
        config.actor.path = str(tiny_model)
        change(config)
        return {"dpo": DPOTrainer, "rw": RWTrainer}[method](config, TRAINING, valid)

    return make


def held_out(trainer) -> dict[str, float]:
    trainer.evaluate("held-out")
    return trainer.stats.export()


def weights(trainer) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in trainer.actor.named_full_tensors()}


@pytest.mark.parametrize(
    ("method", "loss_type", "first_loss"),
    [("dpo", "sigmoid", math.log(2)), ("dpo", "ipo", 25.0), ("rw", "", math.log(2))],
)
def test_before_the_first_step_all_pairs_are_ties(trainer, method, loss_type, first_loss):
    with trainer(method, lambda config: set_loss_type(config, loss_type)) as run:
        before = held_out(run)
    assert before["held-out/loss/avg"] == pytest.approx(first_loss)  # 1 / (2 beta) squared is 25
    assert before["held-out/n_pairs"] == 128
    assert before[f"held-out/{ACCURACY[method]}"] == 0.0  # ties are not right


def set_loss_type(config, loss_type):
    if loss_type:
        config.actor.loss_type = loss_type


@pytest.mark.long
@pytest.mark.parametrize("method", ["dpo", "rw"])
def test_micro_batches_keep_pairs_together_and_do_not_change_the_result(trainer, method, tmp_path):
    def few_tokens(config):
        config.actor.mb_spec.max_tokens_per_mb = 40

    divided, learned = [], []
    for trial, change in (("undivided", lambda config: None), ("split", few_tokens)):
        with trainer(method, change, trial) as run:
            divided.append(run.actor.divide(pairs_to_batch(TRAINING[:32])))
            run.train(stop=lambda step: step == 2)
            learned.append({name: tensor.clone() for name, tensor in run.actor.named_full_tensors()})
    assert divided[0] == [list(range(64))]
    assert len(divided[1]) > 8
    assert all(rows[1::2] == [row + 1 for row in rows[::2]] and rows[0] % 2 == 0 for rows in divided[1])
    for name, tensor in learned[0].items():
        torch.testing.assert_close(learned[1][name], tensor, rtol=0, atol=1e-4)


def test_saved_reward_model_scores_the_same_in_transformers_and_when_loaded_again(trainer, tmp_path):
    with trainer("rw") as run:
        run.train(stop=lambda step: step == 9)
        ours = held_out(run)
    [folder] = tmp_path.glob("checkpoints/*/e/t/default/final")
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    again = trainer("rw", lambda config: setattr(config.actor, "path", str(folder)), "again")
    with again as run:
        assert held_out(run)["held-out/loss/avg"] == pytest.approx(ours["held-out/loss/avg"])
        with torch.no_grad():
            for pair in HELD_OUT[:4]:
                expected = theirs(torch.tensor([pair["chosen_ids"]])).logits.item()
                mine = []
                run.actor.eval_batch(
                    pairs_to_batch([pair]),
                    lambda scores, flat, mine=mine: mine.append(
                        float(scores[int(flat["cu_seqlens"][1]) - 1])
                    ),
                )
                assert mine == [pytest.approx(expected, abs=1e-5)]


@pytest.mark.long
@pytest.mark.parametrize("method", ["dpo", "rw"])
def test_a_continued_run_ends_with_the_bits_of_an_uninterrupted_one(trainer, method):
    def short(mode):
        def change(config):
            config.total_train_steps, config.recover.mode, config.recover.freq_steps = 4, mode, 2

        return change

    with trainer(method, short("disabled"), "undivided") as run:
        run.train()
        undivided = weights(run)
    with trainer(method, short("auto")) as run:
        run.train(stop=lambda step: step == 2)  # its only checkpoint is the one before step 2
    with trainer(method, short("auto")) as run:
        assert run.first_step == 2
        run.train()
        assert weights(run) == undivided


def test_each_validation_pair_goes_to_one_rank_in_equally_many_batches_on_each():
    pairs = [{"chosen_ids": [i]} for i in range(5)]
    batches_of_ranks = [
        supervised.shard_batches(pairs, 4, Ranks(rank, 2, torch.device("cpu"), None)) for rank in range(2)
    ]
    assert [[pair["chosen_ids"][0] for pair in batch] for batch in batches_of_ranks[0]] == [[0, 2], [4]]
    assert [[pair["chosen_ids"][0] for pair in batch] for batch in batches_of_ranks[1]] == [[1, 3], []]
    assert pairs_to_batch(batches_of_ranks[1][1])["input_ids"].shape[0] == 0


def test_options_of_dpo_that_contradict_each_other_are_named(tmp_path):
    config = make_config("dpo", tmp_path)
    assert check_config(config) == []
    config.actor.beta, config.actor.init_from_scratch = 0.0, True
    config.ref = TrainEngineConfig(temperature=0.5)
    with pytest.raises(ConfigError) as error:
        check_config(config)
    for sentence in (
        "actor.beta is 0.0",
        "ref.path is empty",
        "ref.temperature is 0.5",
        "actor.init_from_scratch",
    ):
        assert sentence in str(error.value)


def test_options_of_pairs_are_those_of_their_trainers(tmp_path):
    config = make_config("rw", tmp_path)
    config.actor.is_critic, config.actor.mb_spec.granularity = True, 2
    config.train_dataset.max_length = config.actor.mb_spec.max_tokens_per_mb = 64
    with pytest.raises(
        ConfigError, match=r"^actor.mb_spec.max_tokens_per_mb is 64 .* at least twice the second$"
    ):
        check_config(config)
    config.actor.mb_spec.max_tokens_per_mb = 128
    assert check_config(config) == []
    other = SFTConfig(experiment_name="e", trial_name="t", allocation_mode="fsdp:d1", actor=config.actor)
    other.train_dataset = config.train_dataset
    with pytest.raises(ConfigError, match=r"actor.is_critic is True.*\n.*actor.mb_spec.granularity is 2"):
        check_config(other)


@pytest.mark.long
@pytest.mark.parametrize("method", ["dpo", "rw"])
def test_two_ranks_learn_and_measure_what_one_does(torchrun, tiny_model, tmp_path, method):
    program = Path(__file__).with_name("preferences_program.py")
    one, two, sharing = (
        torchrun(program, count, method, tiny_model, tmp_path / sizes, sizes)
        for count, sizes in ((1, "d1"), (2, "d2"), (2, "d1c2"))
    )
    assert len(one) == 12
    assert two == pytest.approx(one, rel=1e-4)
    assert sharing == pytest.approx(one, rel=1e-4)
    assert one[-1] < 0.9 * one[0]
