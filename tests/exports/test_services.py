"""Offline runs of Weights & Biases and Trackio, read from their files; and the Hugging Face Hub."""

import os
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
