"""Checksummed JSON: it round-trips, and no bit of it can change undetected."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.safety.durable import commit_file
from recorder import DamagedRecord
from recorder.documents import checksummed_bytes, parse_checksummed

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
documents = st.dictionaries(
    st.text(),
    st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10),
    min_size=1,
)


@settings(max_examples=40)
@given(documents, st.data())
def test_one_changed_bit_is_found(document, data):
    written = bytearray(checksummed_bytes(document))
    position = data.draw(st.integers(0, 8 * len(written) - 1))
    written[position // 8] ^= 1 << position % 8
    with pytest.raises(DamagedRecord, match="x: "):
        parse_checksummed(bytes(written), "x")


@settings(max_examples=40)
@given(documents, st.data())
def test_a_document_cut_off_anywhere_is_found(document, data):
    written = checksummed_bytes(document)
    with pytest.raises(DamagedRecord):
        parse_checksummed(written[: data.draw(st.integers(0, len(written) - 1))], "x")


def test_a_change_that_parses_to_the_same_number_is_found():
    written = checksummed_bytes({"lr": 1e-06})
    changed = written.replace(b"1e-06", b"1E-06")
    assert json.loads(changed)["lr"] == json.loads(written)["lr"]
    with pytest.raises(DamagedRecord, match="do not match"):
        parse_checksummed(changed, "x")


def test_a_committed_file_replaces_the_old_one_and_leaves_no_temporary_file(tmp_path):
    commit_file(tmp_path / "a.json", b"old")
    commit_file(tmp_path / "a.json", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.json": b"new"}
