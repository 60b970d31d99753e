"""Offline runs of Weights & Biases and Trackio, read from their files; and the Hugging Face Hub."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from click.testing import CliRunner

from areal_debug.cli import main
from areal_debug.record.services import steps_of
from recorder.tables.formats import export_record
from tests.exports.given import FULL_ROW, write_foreign_record

ROOT = Path(__file__).parents[2]
TABLE = (
    "rank", "row", "prompt_id", "sample_id", "num_tokens", "reward", "finish_reason", "prompt", "completion",
)  # fmt: skip
FIRST = {name: FULL_ROW[name] for name in TABLE if name in FULL_ROW} | {
    "rank": 0,
    "row": 0,
    "prompt_id": 0,
    "sample_id": 0,
}


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Path:
    return write_foreign_record(tmp_path_factory.mktemp("foreign") / "record")


def export(record: Path, service: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the verb in a process of its own: the packages keep threads and folders."""
    arguments = ["record", "export", str(record), "--format", service, "--to", str(folder), *more]
    return subprocess.run(
        [sys.executable, "-m", "areal_debug", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )


def test_the_lines_hold_numbers_and_samples_of_each_step(record, tmp_path):
    export_record(record, "lines", tmp_path / "lines.jsonl")
    (first, stats, samples), (second, nothing, others) = steps_of(tmp_path / "lines.jsonl")
    assert (first, stats) == (0, {"loss": 0.1, "reward/mean": 1.0})
    assert (len(samples), samples[0]) == (4, FIRST)
    assert samples[1]["reward"] is None
    assert (second, nothing, len(others)) == (1, {}, 1)


@pytest.mark.long
def test_weights_and_biases_gets_an_offline_run(record, tmp_path):
    done = export(record, "wandb", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"next: wandb sync {tmp_path}/out/wandb/offline-run-*"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    tables = [json.loads(file.read_text()) for file in (tmp_path / "out").rglob("*.table.json")]
    first, second = sorted(tables, key=lambda table: -len(table["data"]))
    assert dict(zip(first["columns"], first["data"][0], strict=True)) == FIRST
    assert (len(first["data"]), len(second["data"])) == (4, 1)
    (run,) = (tmp_path / "out").rglob("*.wandb")
    assert logged_values(run, "loss") == [0.1]
    assert logged_values(run, "reward/mean") == [1.0]


def logged_values(run: Path, name: str) -> list[float]:
    """Read the values of a name from a run's own file: blocks of 32 KiB with pieces of messages."""
    from wandb.proto import wandb_internal_pb2

    data, place, pieces, values = run.read_bytes(), 7, b"", []
    while place < len(data):
        if -place % 32768 < 7:  # no piece begins in the rest of a block
            place += -place % 32768
        _, size, kind = struct.unpack_from("<IHB", data, place)
        pieces += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole message, or its last piece
            message = wandb_internal_pb2.Record()
            message.ParseFromString(pieces)
            items, pieces = message.history.item, b""
            values += [json.loads(item.value_json) for item in items if name in (item.key, *item.nested_key)]
    return values


@pytest.mark.long
def test_trackio_gets_a_local_run(record, tmp_path):
    done = export(record, "trackio", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["next"] == f"TRACKIO_DIR={tmp_path}/out trackio show --project areal-debug"
    assert facts["files"] == [f"{tmp_path}/out"]
    with sqlite3.connect(tmp_path / "out/areal-debug.db") as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in rows] == [0, 1]
    first = json.loads(rows[0][1])
    assert (first["loss"], first["reward/mean"]) == (0.1, 1.0)
    assert first["samples"]["_value"][0] == FIRST


def test_the_hub_gets_a_private_dataset_unless_public(record, tmp_path, monkeypatch):
    sent = []

    def push_to_hub(self, repository, private):
        sent.append((repository, private, self[0]["advantages"]))
        return type("Commit", (), {"repo_url": f"https://hub.example/{repository}"})

    monkeypatch.setattr(datasets.Dataset, "push_to_hub", push_to_hub)
    arguments = ["record", "export", str(record), "--format", "hf", "--hub", "me/run"]
    for name, more in {"a": [], "b": ["--public"]}.items():
        done = CliRunner().invoke(main, [*arguments, "--to", str(tmp_path / name), *more])
        assert done.exit_code == 0, done.output
        assert "sent to https://hub.example/me/run" in done.output
    assert sent == [("me/run", True, FULL_ROW["advantages"]), ("me/run", False, FULL_ROW["advantages"])]


@pytest.mark.long
def test_the_hub_without_a_network_is_one_sentence_and_the_dataset_is_kept(record, tmp_path):
    done = export(record, "hf", tmp_path / "out", "--hub", "me/run")
    assert done.returncode == 2
    assert "me/run was not sent to the Hugging Face Hub: " in done.stderr
    assert "Traceback" not in done.stderr
    assert len(datasets.load_from_disk(str(tmp_path / "out"))) == 5
    done = export(record, "jsonl", tmp_path / "x", "--hub", "me/run")
    assert "--hub needs --format hf" in done.stderr
