"""Every method improves its validation measure on a tiny task; the documents show the same runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import learning_curves
from benchmarks.larger_numbers import larger_number_rows
from benchmarks.learning_methods import (
    DPO,
    GRPO,
    METHODS,
    OTHER_PRESETS,
    PPO,
    REWARD_MODEL,
    SFT,
    Method,
    learn,
    teach,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with an untrained model and one that is sometimes right."""
    folder = tmp_path_factory.mktemp("larger")
    teach(folder)
    return folder


def adapted(method: Method, *options: str, **changes: object) -> Method:
    """A method that trains an adapter; SFT from the SFT model, as random base weights do not do."""
    adapter = ("experiment_name=adapted", "actor.use_lora=true", "actor.lora_rank=16", "actor.lora_alpha=32")
    options, title = (*method.options, *adapter, *options), f"{method.title} with an adapter"
    changes = {"margin": min(method.margin, 0.08)} | changes
    return replace(method, title=title, options=options, **changes)


ADAPTED = (
    adapted(SFT, is_taught=True),
    adapted(REWARD_MODEL, steps=24, margin=0.2),
    adapted(DPO),
    adapted(GRPO),
    adapted(PPO, "critic.use_lora=true", "critic.lora_rank=16"),
)


def slowly(*methods):
    return [pytest.param(method, id=method.title, marks=pytest.mark.long) for method in methods]


@pytest.mark.parametrize("method", slowly(SFT, REWARD_MODEL, DPO, PPO, GRPO, *OTHER_PRESETS, *ADAPTED))
def test_held_out_measure_rises(method, models):
    curve = learn(method, models)
    assert curve[0][0] == 0
    assert curve[-1][0] == method.steps
    assert curve[-1][1] >= curve[0][1] + method.margin


def test_numbers_that_meet_in_a_held_out_question_never_meet_in_training():
    training, held_out = larger_number_rows()
    meeting = [{frozenset((row["chosen"], row["rejected"])) for row in rows} for rows in (training, held_out)]
    assert not meeting[0] & meeting[1]
    assert [len(pairs) for pairs in meeting] == [1024, 128]
    for row in training + held_out:
        [first, second] = row["messages"][0]["content"].split()
        assert row["answer"] == row["chosen"] == max(first, second) != row["rejected"]


def test_documents_are_drawn_from_curves_that_rise():
    trained = json.loads(learning_curves.CURVES.read_text())
    for file, text in learning_curves.draw(trained).items():
        assert (ROOT / "docs" / "measurements" / file).read_text() == text, (
            "benchmarks/learning_curves.py regenerates them"
        )
    for method in (*METHODS, *OTHER_PRESETS):
        curves = learning_curves.curves_of(method, trained)
        assert len(curves) >= (3 if method in METHODS else 1)
        for curve in curves:
            assert curve[-1][0] == method.steps
            assert curve[-1][1] >= curve[0][1] + method.margin, method.name
