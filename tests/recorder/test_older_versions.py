"""The format is that of FORMAT.md, older versions are read, newer ones refused in one sentence."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import recorder
from recorder import open_record, verify
from recorder.testing import write_scripted_record, write_worked_example
from tests.command_line import printed
from tests.recorder.document_reader import read_by_the_document
from tests.recorder.full_record import sealed, write_full_record


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


DOCUMENT = (Path(recorder.__file__).parent / "FORMAT.md").read_text()


@pytest.fixture
def example(tmp_path):
    write_worked_example(tmp_path)
    return {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()}


def test_the_document_lists_every_file_as_it_is(example):
    """When this fails the format has changed: raise FORMAT_VERSION and document it in FORMAT.md."""
    listed = dict(
        re.findall(r"^`([\w./-]+)`, [^\n]*:\n\n```(?:json|hex)\n(.*?)```", DOCUMENT, re.DOTALL | re.MULTILINE)
    )
    assert set(listed) == set(example)
    for name, path in example.items():
        text = hex_dump(path.read_bytes()) if path.suffix == ".safetensors" else path.read_text()
        assert listed[name] == text, name


def hex_dump(data: bytes) -> str:
    """Format sixteen bytes a line, as `xxd` prints them."""
    lines = []
    for begin in range(0, len(data), 16):
        part = data[begin : begin + 16]
        pairs = " ".join(part[i : i + 2].hex() for i in range(0, len(part), 2))
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{begin:08x}: {pairs:<39}  {letters}\n")
    return "".join(lines)


def test_a_reader_written_from_the_document_reads_a_complete_record(tmp_path):
    write_full_record(tmp_path / "record")
    ours, seen = open_record(tmp_path / "record"), []
    for step, arrays in read_by_the_document(tmp_path / "record"):
        recorded = ours.step(step["step"])
        for key, array in recorded.batch(0).items():
            assert array.tolist() == arrays["batch-00000-of-00001.safetensors", key].tolist()
        for key, array in recorded.learning(0).items():
            assert array.tolist() == arrays["learning-00000-of-00001.safetensors", key].tolist()
        seen.append(step["step"])
    assert seen == [2, 3, 4]
