"""Data sent to Weights & Biases and Trackio, with fakes and with the real packages."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from areal_core.config import PPOConfig
from areal_core.telemetry.loggers import StatsLogger
from areal_core.trainer.build import build_services


@pytest.fixture
def config(tmp_path) -> PPOConfig:
    config = PPOConfig(experiment_name="math", trial_name="a/b")
    config.cluster.fileroot = str(tmp_path)
    config.actor.path = "model"
    config.stats_logger.wandb.wandb_api_key = "secret"
    return config


def stand_in(monkeypatch, name: str) -> list[tuple]:
    """Install a module `name` whose runs append (call, arguments) to the returned list."""
    calls = []

    def init(**options):
        calls.append(("init", options))
        return SimpleNamespace(
            log=lambda stats, step: calls.append(("log", step, dict(stats))),
            finish=lambda: calls.append(("finish",)),
        )

    module = ModuleType(name)
    module.init = init
    monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_weights_and_biases_gets_one_run_that_can_be_continued_and_no_key_in_its_config(
    config, monkeypatch, tmp_path
):
    calls = stand_in(monkeypatch, "wandb")
    config.stats_logger.wandb.mode, config.stats_logger.wandb.tags = "offline", ["x"]
    with StatsLogger(build_services(config, tmp_path)) as logger:
        logger.commit(0, {"ppo_actor/task_reward/avg": 0.25})
        logger.commit(1, {"ppo_actor/task_reward/avg": 0.5})
    (_, options), *rest = calls
    sent = options.pop("config")
    assert options == {
        "mode": "offline",
        "project": "math",
        "name": "a/b",
        "id": "math_a-b_train",
        "group": "math_a/b",
        "tags": ["x"],
        "resume": "allow",
        "dir": str(tmp_path),
        "settings": {"api_key": "secret"},
    }
    assert sent["actor"]["path"] == "model"
    assert "secret" not in str(sent)
    assert rest == [
        ("log", 0, {"ppo_actor/task_reward/avg": 0.25}),
        ("log", 1, {"ppo_actor/task_reward/avg": 0.5}),
        ("finish",),
    ]


@pytest.mark.parametrize(("mode", "space"), [("local", None), ("online", "me/space")])
def test_trackio_sends_to_a_space_only_when_it_is_online(config, monkeypatch, tmp_path, mode, space):
    calls = stand_in(monkeypatch, "trackio")
    config.stats_logger.trackio.mode, config.stats_logger.trackio.space_id = mode, "me/space"
    (logger,) = build_services(config, tmp_path)
    logger(3, {"loss": 1.0})
    logger.close()
    (_, options), *rest = calls
    sent = options.pop("config")
    assert options == {"project": "math", "name": "a/b", "resume": "allow"} | (
        {"space_id": space} if space else {}
    )
    assert "secret" not in str(sent)
    assert rest == [("log", 3, {"loss": 1.0}), ("finish",)]
