"""What Weights & Biases and Trackio are told, by stand-ins for the packages that write down every call."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from areal_core.config import PPOConfig, SFTConfig
from areal_core.errors import ConfigError
from areal_core.telemetry import StatsLogger
from areal_core.trainer.build_services import build_services


@pytest.fixture
def config(tmp_path) -> PPOConfig:
    config = PPOConfig(experiment_name="math", trial_name="a/b")
    config.cluster.fileroot = str(tmp_path)
    config.actor.path = "model"
    config.stats_logger.wandb.wandb_api_key = "secret"
    return config


def stand_in(monkeypatch, name: str) -> list[tuple]:
    """A module `name` whose runs append (call, arguments) to the list that is returned."""
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


@pytest.mark.parametrize(("name", "mode"), [("wandb", "online"), ("trackio", "local")])
def test_a_service_whose_package_is_missing_is_one_sentence(config, monkeypatch, tmp_path, name, mode):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed, also where it is
    getattr(config.stats_logger, name).mode = mode
    with pytest.raises(ConfigError) as error:
        build_services(config, tmp_path)
    assert str(error.value) == (
        f"stats_logger.{name}.mode is '{mode}' and the package {name} is not installed: "
        f"pip install {name}, or set the mode to 'disabled'"
    )


def test_trackio_online_wants_a_space(config, tmp_path):
    config.stats_logger.trackio.mode = "online"
    with pytest.raises(ConfigError, match="space_id is empty"):
        build_services(config, tmp_path)


def test_nothing_is_built_unless_asked_for(tmp_path):
    assert build_services(SFTConfig(experiment_name="a", trial_name="b"), tmp_path) == []
