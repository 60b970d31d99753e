"""Records of each older format version are read, newer ones are refused in one sentence."""

import json
from pathlib import Path

import numpy as np
import pytest

from recorder import open_record, verify
from recorder.testing import write_scripted_record
from tests.command_line import printed
from tests.recorder.full_record import sealed


def rewrite(file: Path, without: str = "", **members: object) -> None:
    document = {k: v for k, v in json.loads(file.read_bytes()).items() if k not in (without, "crc32c")}
    file.write_bytes(sealed(json.dumps(document | members)))


def as_version_1(record: Path) -> None:
    """Give the record the layout of version 1: no chain, no end mark."""
    (record / "end.json").unlink()
    rewrite(record / "record.json", format_version=1)
    for file in record.glob("steps/*/step.json"):
        rewrite(file, without="previous", format_version=1)


def test_a_record_of_version_1_has_the_same_values(tmp_path):
    for name in ("old", "new"):
        write_scripted_record(tmp_path / name, num_steps=3)
    as_version_1(tmp_path / "old")
    old, new = open_record(tmp_path / "old"), open_record(tmp_path / "new")
    assert old.header.format_version == 1
    assert tuple(old.steps) == tuple(new.steps) == (0, 1, 2)
    for step in new.steps:
        assert old.step(step).manifest.previous is None
        a, b = old.step(step).batch(0), new.step(step).batch(0)
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[key], b[key]) for key in a)
    found = verify(tmp_path / "old")
    assert found.intact
    (tmp_path / "old/steps/000001/batch-00000-of-00001.safetensors").write_bytes(b"")
    assert not verify(tmp_path / "old").intact


@pytest.mark.parametrize("file", ["record.json", "steps/000000/step.json"])
def test_a_newer_version_ends_a_verb_with_one_sentence(tmp_path, file):
    write_scripted_record(tmp_path / "record", num_steps=1)
    rewrite(tmp_path / "record" / file, format_version=4)
    said = " ".join(printed("record", "show", tmp_path / "record", "--step", "0", code=2).split())
    assert "format version 4, this version of areal-debug reads 1" in said
    assert said.endswith("install the version that wrote it")
    assert "Traceback" not in said
