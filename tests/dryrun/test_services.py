"""Data sent to Weights & Biases and Trackio, with fakes and with the real packages."""

import json
import os
import sqlite3
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from areal_core.config import PPOConfig, SFTConfig
from areal_core.errors import ConfigError
from areal_core.telemetry.loggers import StatsLogger
from areal_core.trainer.build import build_services
from tests.exports.given import logged_values


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


@pytest.mark.long
def test_the_real_weights_and_biases_package_writes_every_step_offline(config, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the package: pip install 'areal-debug[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config.stats_logger.wandb.mode, config.stats_logger.wandb.wandb_api_key = "offline", ""
    monkeypatch.setattr("sys.argv", ["train.py", "stats_logger.wandb.wandb_api_key=S3CRET-key", "seed=7411"])
    with StatsLogger(build_services(config, tmp_path)) as logger:
        logger.commit(0, {"ppo_actor/task_reward/avg": 0.25})
        logger.commit(1, {"ppo_actor/task_reward/avg": 0.1 + 0.2})
    wandb.teardown()  # afterwards its process, which may still be writing, has ended
    [run] = tmp_path.glob("wandb/offline-run-*")
    assert run.name.endswith("-math_a-b_train")
    [written] = run.glob("*.wandb")
    assert logged_values(written, "_step") == [0, 1]
    assert logged_values(written, "ppo_actor/task_reward/avg") == [0.25, 0.1 + 0.2]
    assert b"seed=7411" in written.read_bytes()  # the package stores the command line
    assert b"S3CRET-key" not in written.read_bytes()


@pytest.mark.long
def test_the_real_trackio_package_writes_every_step_into_its_local_database(config, tmp_path):
    pytest.importorskip("trackio", reason="needs the package: pip install 'areal-debug[trackio]'")
    program = """
import sys
from areal_core.telemetry.loggers import TrackioLogger
for first in (0, 1):
    log = TrackioLogger("local", None, project="math", name="t")
    for step in range(first, first + 2):
        log(step, {"ppo_actor/task_reward/avg": step / 4})
    log.close()
"""
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=240)
    with sqlite3.connect(tmp_path / "math.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    logged = [(name, step, json.loads(metrics)["ppo_actor/task_reward/avg"]) for name, step, metrics in rows]
    assert logged == [
        ("t", 0, 0.0),
        ("t", 1, 0.25),
        ("t", 1, 0.25),
        ("t", 2, 0.5),
    ]  # a repeated step is there twice


def test_nothing_is_built_unless_requested(tmp_path):
    assert build_services(SFTConfig(experiment_name="a", trial_name="b"), tmp_path) == []
