"""The checkpoint from which a run continues, damaged and foreign ones, and lines of stats.jsonl."""

import json
import logging
import threading
from dataclasses import replace

import pytest

from areal_core.config.train_engine import OptimizerConfig
from areal_core.engine.checkpoint.files import _checksum, read_checkpoint
from areal_core.errors import CheckpointError
from areal_core.trainer import checkpointing
from areal_core.trainer.checkpointing import find_checkpoint
from areal_core.trainer.sft import SFTTrainer
from tests.trainer.supervised_config import make_config

ROWS = [{"input_ids": [5 + i, 6, 7, 8 + i % 3], "loss_mask": [0, 1, 1, 1]} for i in range(8)]
OPTIMIZER = OptimizerConfig(lr=1e-2, lr_scheduler_type="linear", warmup_steps_proportion=0.0)


@pytest.fixture
def train(tiny_model, in_process, tmp_path):
    """Train four steps of two rows: `train(mode, stop_after)` returns the final weights."""

    def run(
        mode: str, stop_after: int = 3, trial: str = "t", freq_steps: int = 1, **options: object
    ) -> dict[str, list[float]]:
        given = {"trial_name": trial, "actor.optimizer": OPTIMIZER}
        given |= {"recover.mode": mode, "recover.freq_steps": freq_steps}
        given |= {name.replace("__", "."): value for name, value in options.items()}
        config = make_config("sft", tmp_path, tiny_model, 2, given)
        with SFTTrainer(config, ROWS, join=in_process) as trainer:
            trainer.train(stop=lambda step: step == stop_after)
            run.group = trainer.actor.optimizer.param_groups[0]
            return {name: tensor.tolist() for name, tensor in trainer.actor.named_full_tensors()}

    return run


@pytest.fixture
def checkpoints(tmp_path):
    """Return the folder of the run's checkpoints: `checkpoints("t")`."""

    def folder(trial: str = "t"):
        [user] = (tmp_path / "checkpoints").iterdir()
        return user / "e" / trial / "recover"

    return folder


@pytest.fixture
def steps_logged(tmp_path):
    def steps(trial: str = "t", name: str = "stats.jsonl") -> list[int]:
        [file] = tmp_path.glob(f"logs/*/e/{trial}/{name}")
        return [json.loads(line)["step"] for line in file.read_text().splitlines()]

    return steps


def test_a_continued_run_ends_with_the_bits_of_an_uninterrupted_one(train, checkpoints, steps_logged):
    uninterrupted = train("disabled", trial="uninterrupted")
    train("auto", stop_after=2, freq_steps=2)  # its only checkpoint is the one before step 2
    assert steps_logged() == [0, 1, 2]
    assert train("auto") == uninterrupted
    assert steps_logged() == [0, 1, 2, 3]
    assert sorted(entry.name for entry in checkpoints().iterdir()) == ["step-000003", "step-000004"]


def test_the_options_of_the_optimizer_are_those_of_the_resumed_run(train, caplog):
    train("auto", stop_after=1)
    changed = replace(OPTIMIZER, lr=1e-3, beta1=0.8, eps=1e-6, weight_decay=0.0)
    with caplog.at_level(logging.INFO):
        train("auto", stop_after=2, actor__optimizer=changed)
    assert train.group["lr"] == 1e-3 * 0.25  # after 3 of 4 steps of a linear decay
    assert [train.group[name] for name in ("betas", "eps", "weight_decay")] == [(0.8, 0.999), 1e-6, 0.0]
    assert "actor.optimizer.lr changed from 0.01 to 0.001" in caplog.text


def test_checkpoints_that_a_thread_writes_contain_the_same_bits(train, checkpoints):
    assert train("auto", trial="beside", saver__mode="async") == train("auto", trial="waited")
    contents = []
    for trial in ("beside", "waited"):
        assert sorted(folder.name for folder in checkpoints(trial).iterdir()) == [
            "step-000003",
            "step-000004",
        ]
        checkpoint = read_checkpoint(checkpoints(trial) / "step-000004")
        del checkpoint.state["timers"]
        contents.append(checkpoint)
    assert contents[0] == contents[1]


def test_a_run_that_fails_abandons_its_unfinished_checkpoint_and_continues_from_the_previous_one(
    train, checkpoints, monkeypatch
):
    uninterrupted = train("disabled", trial="uninterrupted")
    write, started = checkpointing.write_snapshot, threading.Event()

    def stuck(snapshot, given_up):
        if snapshot.folder.name == "step-000002":
            started.set()
            given_up.wait()
            raise CheckpointError("given up")
        write(snapshot, given_up)

    monkeypatch.setattr(checkpointing, "write_snapshot", stuck)
    loss = SFTTrainer.loss

    def fails_in_step_2(trainer, *arguments):
        if started.is_set():
            raise RuntimeError("out of memory")
        return loss(trainer, *arguments)

    monkeypatch.setattr(SFTTrainer, "loss", fails_in_step_2)
    with pytest.raises(RuntimeError, match="out of memory"):
        train("auto", saver__mode="async")
    assert sorted(folder.name for folder in checkpoints().iterdir()) == ["step-000001", "step-000002.partial"]
    monkeypatch.setattr(SFTTrainer, "loss", loss)
    monkeypatch.setattr(checkpointing, "write_snapshot", write)
    assert train("auto", saver__mode="async") == uninterrupted


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(
    train, checkpoints, steps_logged, caplog
):
    uninterrupted = train("auto")
    [tensors] = (checkpoints() / "step-000004" / "actor").iterdir()
    damaged = bytearray(tensors.read_bytes())
    damaged[-1] ^= 1
    tensors.write_bytes(damaged)
    with caplog.at_level(logging.INFO):
        assert train("resume") == uninterrupted
    assert f"skipping a checkpoint: {tensors} is missing or damaged" in caplog.text
    assert f"continuing at step 3 from {checkpoints() / 'step-000003'}" in caplog.text
    assert steps_logged() == [0, 1, 2, 3]


def test_a_state_of_another_type_is_one_sentence(train, checkpoints):
    train("auto")
    written = {file: file.read_text() for file in checkpoints().glob("*/checkpoint.json")}
    for keys, value in (
        (("state", "step"), "3"),
        (("state", "step"), -1),
        (("state", "sources"), [{}]),
        (("state", "timers"), []),
        (("engines", "actor", "schedule"), 1e308),
        (("engines", "actor", "folder"), 10**30),
        (("rng",), [{}]),
    ):
        for file, text in written.items():
            document = json.loads(text)
            inner = document["content"]
            for key in keys[:-1]:
                inner = inner[key]
            inner[keys[-1]] = value
            document["crc32c"] = _checksum(document["content"])
            file.write_text(json.dumps(document))
        with pytest.raises(CheckpointError, match=r"use another one|has no complete checkpoint"):
            train("resume")


def test_fault_starts_from_the_beginning_and_continues_only_its_own_run(
    train, checkpoints, monkeypatch, steps_logged
):
    train("auto")
    train("fault", stop_after=0, freq_steps=2)  # ends before its first checkpoint
    assert steps_logged() == [0]
    assert steps_logged("t/before-1", "metrics.jsonl") == [0, 1, 2, 3]
    assert sorted(entry.name for entry in checkpoints().iterdir()) == ["before-000003", "before-000004"]
    monkeypatch.setenv("AREAL_RECOVER_RUN", "1")
    train("fault", stop_after=1)  # nothing of its own to continue from: from the beginning
    assert steps_logged() == [0, 1]
    assert sorted(entry.name for entry in checkpoints().iterdir()) == ["step-000001", "step-000002"]
    assert find_checkpoint(checkpoints(), "fault", is_restart=True).name == "step-000002"
