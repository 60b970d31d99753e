"""The format does not change by accident, and FORMAT.md lists the actual bytes on disk."""

import re
from pathlib import Path

import pytest

import recorder
from recorder import open_record
from recorder.documents import checksum
from recorder.testing import write_worked_example
from tests.recorder.document_reader import read_by_the_document
from tests.recorder.full_record import write_full_record

DOCUMENT = (Path(recorder.__file__).parent / "FORMAT.md").read_text()
CHECKSUMS = {
    "end.json": "7a875b7e",
    "record.json": "a985d436",
    "steps/000000/batch-00000-of-00001.safetensors": "416b5c37",
    "steps/000000/outcome-00000-of-00001.json": "eec03254",
    "steps/000000/plan-00000-of-00001.json": "893bd5f3",
    "steps/000000/step.json": "e0debf65",
}


@pytest.fixture
def example(tmp_path):
    write_worked_example(tmp_path)
    return {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()}


def test_the_format_has_not_changed(example):
    """When this fails the format has changed: raise FORMAT_VERSION and document it in FORMAT.md."""
    assert {name: checksum(path.read_bytes()) for name, path in example.items()} == CHECKSUMS


def test_the_document_lists_every_file_as_it_is(example):
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
