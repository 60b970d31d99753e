"""Runs that train an adapter instead of the weights: each method's validation measure rises."""

from dataclasses import replace
from pathlib import Path

import pytest

from areal_core.testing import make_tiny_model
from benchmarks.learning_methods import DPO, GRPO, PPO, REWARD_MODEL, SFT, Method, learn, teach

ADAPTER = ("actor.use_lora=true", "actor.lora_rank=16", "actor.lora_alpha=32")


def adapted(method: Method, *options: str) -> Method:
    return replace(method, options=(*method.options, *ADAPTER, *options))


@pytest.mark.long
def test_held_out_pairs_are_ranked_by_a_reward_model_with_an_adapter(tmp_path):
    make_tiny_model(tmp_path / "untrained")
    curve = learn(replace(adapted(REWARD_MODEL), steps=24), tmp_path)
    assert curve[-1] == (24, pytest.approx(1.0, abs=0.3))
    assert curve[-1][1] >= curve[0][1] + 0.2


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with an untrained model and one that is sometimes right."""
    folder = tmp_path_factory.mktemp("larger")
    teach(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [
        adapted(replace(SFT, is_taught=True)),
        adapted(DPO),
        adapted(GRPO),
        adapted(PPO, "critic.use_lora=true", "critic.lora_rank=16"),
    ],
    ids=lambda method: method.name,
)
def test_held_out_measure_rises_with_an_adapter(method, models):
    """SFT starts from the SFT model, too: an adapter cannot do much with random base weights."""
    curve = learn(method, models)
    assert curve[-1][0] == method.steps
    assert curve[-1][1] >= curve[0][1] + min(method.margin, 0.08)
