"""Training on pairs: validation accuracy rises, pairs stay together, the saved model is correct."""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from areal_core.config.train_engine import OptimizerConfig
from areal_core.engine.ranks import Ranks
from areal_core.trainer import supervised
from areal_core.trainer.batches import pairs_to_batch
from benchmarks.larger_numbers import larger_number_rows
from benchmarks.learning_methods import pairs
from tests.trainer.supervised_config import METHODS, make_config


@cache
def training_and_held_out():
    return tuple(map(pairs, larger_number_rows()))


@pytest.fixture
def trainer(tiny_model, in_process, tmp_path):
    """Build a trainer in this process: `trainer(method, options)`; batches of 32 pairs, 3 epochs."""

    def make(method: str, options: dict[str, object]):
        optimizer = OptimizerConfig(
            lr=3e-3, weight_decay=0.0, lr_scheduler_type="linear", warmup_steps_proportion=0.1
        )
        given = {"actor.optimizer": optimizer, "total_train_epochs": 3} | options
        config = make_config(method, tmp_path, tiny_model, 32, given)
        return METHODS[method][1](config, *training_and_held_out(), join=in_process)

    return make


def held_out(trainer) -> dict[str, float]:
    trainer.evaluate("held-out")
    return trainer.stats.export()


def test_saved_reward_model_scores_the_same_in_transformers_and_when_loaded_again(trainer, tmp_path):
    with trainer("rw", {}) as run:
        run.train(stop=lambda step: step == 9)
        ours = held_out(run)
    [folder] = tmp_path.glob("checkpoints/*/e/t/default/final")
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    again = trainer("rw", {"actor.path": str(folder), "trial_name": "again"})
    with again as run:
        assert held_out(run)["held-out/loss/avg"] == pytest.approx(ours["held-out/loss/avg"])
        with torch.no_grad():
            for pair in training_and_held_out()[1][:4]:
                expected = theirs(torch.tensor([pair["chosen_ids"]])).logits.item()
                mine = []
                run.actor.eval_batch(
                    pairs_to_batch([pair]),
                    lambda scores, flat, mine=mine: mine.append(
                        float(scores[int(flat["cu_seqlens"][1]) - 1])
                    ),
                )
                assert mine == [pytest.approx(expected, abs=1e-5)]


def test_each_validation_pair_goes_to_one_rank_in_equally_many_batches_on_each():
    pairs = [{"chosen_ids": [i]} for i in range(5)]
    batches_of_ranks = [
        supervised.shard_batches(pairs, 4, Ranks(rank, 2, torch.device("cpu"), None)) for rank in range(2)
    ]
    assert [[pair["chosen_ids"][0] for pair in batch] for batch in batches_of_ranks[0]] == [[0, 2], [4]]
    assert [[pair["chosen_ids"][0] for pair in batch] for batch in batches_of_ranks[1]] == [[1, 3], []]
    assert pairs_to_batch(batches_of_ranks[1][1])["input_ids"].shape[0] == 0


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
