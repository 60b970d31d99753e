"""Imported records are trained on by our trainer, and the result is never called a replay."""

import json
from pathlib import Path

import pytest

from tests.forks import COMMAND, run_forked

from . import pickled

HERE = Path(__file__).parent


def test_one_batch_from_three_formats_trains_to_the_same_bits(tiny_model, tmp_path):
    done = run_forked([str(HERE / "replay_program.py"), str(tiny_model), str(tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout.strip().splitlines()[-1])
    assert set(printed) == {"slime", "areal", "verl"}
    assert float.fromhex(printed["slime"]["grad_norm"]) > 0.001
    for name in ("areal", "verl"):
        assert (printed[name]["loss"], printed[name]["grad_norm"]) == (
            printed["slime"]["loss"],
            printed["slime"]["grad_norm"],
        )
    # there is nothing to compare with, and so no verdict of equality
    assert {(one["guarantee"], one["identical"], one["exit_code"]) for one in printed.values()} == {
        ("unrecorded", False, 2)
    }


@pytest.mark.long
def test_what_is_recorded_of_an_imported_batch_replays_bit_by_bit(tiny_model, tmp_path):
    source = pickled.write_slime(tmp_path / "slime")

    def call(*arguments, code=0):
        done = run_forked([COMMAND, *map(str, arguments)])
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    config = ("--config", HERE.parent / "debug" / "tiny.yaml", f"cluster.fileroot={tmp_path}")
    call(
        "record",
        "import",
        source,
        "--to",
        tmp_path / "a",
        *config,
        "deterministic=true",
        "--model",
        tiny_model,
    )
    message = call("replay", tmp_path / "a", "--output", tmp_path / "b", code=2)
    assert "Nothing to compare: 2 steps were trained on recorded rollouts." in message
    assert "Bit-identical: 2 of 2 steps" in call("replay", tmp_path / "b")
