"""Records to change, and a way to seal what was changed."""

import json
from pathlib import Path

import pytest

from recorder import verify
from recorder.documents import checksum
from recorder.testing import write_scripted_record
from tests.recorder.full_record import sealed, write_full_record


@pytest.fixture
def record(tmp_path) -> Path:
    """Six steps of one rank, with an end mark."""
    write_scripted_record(tmp_path / "record", num_steps=6)
    assert verify(tmp_path / "record").intact
    return tmp_path / "record"


@pytest.fixture
def full_record(tmp_path) -> Path:
    """Steps 2 to 4 of five, with every kind of file."""
    write_full_record(tmp_path / "original")
    assert verify(tmp_path / "original").intact
    return tmp_path / "original"


@pytest.fixture
def change():
    """Change a JSON file by a function of its document, and seal it and its entry in step.json."""

    def changed(file: Path, edit) -> None:
        data = file.read_bytes()
        is_sealed = b'\n "crc32c": "' in data[-30:]
        document = json.loads(data)
        edit(document)
        data = sealed(json.dumps(document)) if is_sealed else json.dumps(document).encode()
        file.write_bytes(data)
        if not is_sealed:
            entry = {"size_bytes": len(data), "crc32c": checksum(data)}
            changed(file.with_name("step.json"), lambda step: step["files"].update({file.name: entry}))

    return changed
