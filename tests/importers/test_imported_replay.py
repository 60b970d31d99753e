"""Imported records are trained on by our trainer, and the result is never called a replay."""

from pathlib import Path

import pytest

from tests.forks import COMMAND, run_forked

from . import pickled

TINY = Path(__file__).parents[1] / "debug" / "tiny.yaml"


@pytest.mark.long
def test_what_is_recorded_of_an_imported_batch_replays_bit_by_bit(tiny_model, tmp_path):
    source = pickled.write_slime(tmp_path / "slime")

    def call(*arguments, code=0):
        done = run_forked([COMMAND, *map(str, arguments)])
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    options = ("--model", tiny_model, f"cluster.fileroot={tmp_path}", "deterministic=true")
    call("record", "import", source, "--to", tmp_path / "a", "--config", TINY, *options)
    message = call("replay", tmp_path / "a", "--output", tmp_path / "b", code=2)
    assert "Nothing to compare: 2 steps trained on recorded rollouts." in message
    assert "Bit-identical: 2 of 2 steps" in call("replay", tmp_path / "b")
