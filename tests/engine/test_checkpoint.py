"""Checkpoints: contents, damage, writing in the background, other numbers of ranks."""

import json
import shutil
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

from areal_core.engine.checkpoint import distributed as checkpoints
from areal_core.engine.checkpoint import files, shards
from areal_core.engine.checkpoint.background_save import BackgroundSave
from areal_core.engine.checkpoint.distributed import (
    load_checkpoint,
    save_checkpoint,
    take_snapshot,
    write_snapshot,
)
from areal_core.engine.checkpoint.files import read_checkpoint
from areal_core.engine.determinism import rng_state
from areal_core.errors import CheckpointError, CheckpointNotWritten
from areal_core.testing import make_tiny_model
from tests.engine import steps_program as program


@pytest.fixture
def engine(ranks, tiny_model):
    """An engine that has trained a step."""
    engine = program.make_engine(ranks, str(tiny_model), 100)
    program.train_step(engine, program.rows())
    return engine


@pytest.fixture
def fresh(ranks, tiny_model):
    return program.make_engine(ranks, str(tiny_model), 100)


@pytest.fixture(scope="module")
def saved(ranks, tiny_model, tmp_path_factory):
    """A checkpoint of an actor and a critic. Read-only: tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("saved") / "000001"
    engines = {name: program.make_engine(ranks, str(tiny_model), 100) for name in ("actor", "critic")}
    program.train_step(engines["actor"], program.rows())
    save_checkpoint(folder, engines, {"step": 1})
    return folder


def everything(engine) -> dict[str, bytes]:
    """Return the bits of all weights and optimizer states."""
    tensors = checkpoints._weights(engine) | checkpoints._tensors_of(checkpoints._optimizer_state(engine))
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).numpy().tobytes()
        for name, t in tensors.items()
    }


def test_every_engine_comes_back_with_its_optimizer_schedule_and_random_state(ranks, tiny_model, tmp_path):
    engines = {name: program.make_engine(ranks, str(tiny_model), 100) for name in ("actor", "critic")}
    for _ in range(2):
        program.train_step(engines["critic"], program.rows())
    program.train_step(engines["actor"], program.rows())
    save_checkpoint(tmp_path / "c", engines, {"step": 3, "sources": [{"a": 1.5}]})
    drawn = torch.rand(3), rng_state()
    again = {name: program.make_engine(ranks, str(tiny_model), 100) for name in ("actor", "critic")}
    assert load_checkpoint(tmp_path / "c", again) == {"step": 3, "sources": [{"a": 1.5}]}
    assert torch.equal(torch.rand(3), drawn[0])
    assert rng_state() == drawn[1]
    for name, engine in engines.items():
        assert everything(again[name]) == everything(engine)
        assert again[name].schedule.state_dict() == engine.schedule.state_dict()
    assert again["critic"].schedule.get_last_lr() != again["actor"].schedule.get_last_lr()
    steps = [program.train_step(of["actor"], program.rows()) for of in (engines, again)]
    assert steps[0] == steps[1]


def test_checkpoints_of_one_engine_in_the_first_format_are_read(engine, fresh, tmp_path):
    optimizer = checkpoints._tensors_of(checkpoints._optimizer_state(engine))
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "old/tensors"), save_distributed=True)
    dcp.save(checkpoints._weights(engine) | optimizer, storage_writer=writer)
    content = {
        "format": 1,
        "has_optimizer": True,
        "schedule": engine.schedule.state_dict(),
        "rng": [rng_state()],
        "state": {"step": 7},
        "files": {f.name: files.file_checksum(f) for f in (tmp_path / "old/tensors").iterdir()},
    }
    (tmp_path / "old/checkpoint.json").write_text(json.dumps(content))
    assert load_checkpoint(tmp_path / "old", {"actor": fresh}) == {"step": 7}
    assert everything(fresh) == everything(engine)


@pytest.mark.parametrize("file", ["checkpoint.json", "actor/rank-00000-of-00001.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "shorter", "longer", "flipped"])
def test_damage_is_named(saved, tmp_path, file, damage):
    shutil.copytree(saved, tmp_path / "c")
    damaged = tmp_path / "c" / file
    content = damaged.read_bytes()
    flipped = content[:-9] + bytes([content[-9] ^ 16]) + content[-8:]
    damaged.write_bytes(
        {"missing": b"", "shorter": content[:-1], "longer": content + b"x", "flipped": flipped}[damage]
    )
    if damage == "missing":
        damaged.unlink()
    with pytest.raises(CheckpointError, match=damaged.name):
        read_checkpoint(tmp_path / "c")


def test_another_model_or_engine_is_one_sentence(saved, ranks, fresh, tmp_path):
    wider = make_tiny_model(tmp_path / "wider", hidden_size=96)
    with pytest.raises(
        CheckpointError,
        match=r"is of another model or optimizer: model\..* has shape \[\d+, 64\] there and has shape \[\d+, 96\] here",
    ):
        load_checkpoint(saved, {"actor": program.make_engine(ranks, str(wider), 100)})
    with pytest.raises(CheckpointError, match=r"has only actor, critic, and this run also has a teacher"):
        load_checkpoint(saved, {"actor": fresh, "teacher": fresh})


def test_a_snapshot_does_not_change_while_training_continues(engine, fresh, tmp_path):
    before, snapshot = everything(engine), take_snapshot(tmp_path / "c", {"actor": engine}, {})
    program.train_step(engine, program.rows())
    write_snapshot(snapshot, threading.Event())
    load_checkpoint(tmp_path / "c", {"actor": fresh})
    assert everything(fresh) == before != everything(engine)


def test_a_failed_write_is_reported_by_the_training_thread_in_one_sentence(engine, tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "c", {"actor": engine}, {})
    snapshot = take_snapshot(tmp_path / "c", {"actor": engine}, {})

    def full(file, pieces):
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(checkpoints, "write_pieces", full)
    writing = BackgroundSave()
    writing.start(tmp_path / "c", lambda given_up: write_snapshot(snapshot, given_up))
    with pytest.raises(
        CheckpointNotWritten, match=r"^cannot write the checkpoint .*/c: .*No space left on device.*$"
    ):
        writing.wait()
    assert writing.finished() is None
    read_checkpoint(tmp_path / "c")  # the previous one is still complete


def test_a_disk_that_returns_other_bytes_is_detected(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "file_checksum", lambda file: "00000000")
    with pytest.raises(
        CheckpointNotWritten, match=r"reads back with crc32c 00000000, but [0-9a-f]{8} was written"
    ):
        save_checkpoint(tmp_path / "c", {"actor": engine}, {})


def test_a_checkpoint_that_waits_for_another_rank_is_abandoned_when_that_has_failed(engine, tmp_path):
    alone = take_snapshot(tmp_path / "c", {"actor": engine}, {})
    of_two = checkpoints.Snapshot(tmp_path / "c", 0, 2, alone.pieces, alone.checkpoint)
    writing = BackgroundSave()
    writing.start(tmp_path / "c", lambda given_up: write_snapshot(of_two, given_up))
    writing.close()
    with pytest.raises(CheckpointNotWritten, match="before rank 1 had written its files"):
        writing.wait()
    assert not (tmp_path / "c").exists()
