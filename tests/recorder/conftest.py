"""A small record on disk, written by the real writer."""

from pathlib import Path

import pytest

from recorder.testing import write_scripted_record


@pytest.fixture
def record_of_two_ranks(tmp_path) -> Path:
    write_scripted_record(tmp_path / "record", num_steps=3, num_ranks=2)
    return tmp_path / "record"


@pytest.fixture
def record_of_one_rank(tmp_path) -> Path:
    write_scripted_record(tmp_path / "record", num_steps=1, num_ranks=1)
    return tmp_path / "record"
