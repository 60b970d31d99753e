"""`areal-debug record redact`: a copy without credentials, texts or pictures."""

import json
import re
import sys
from pathlib import Path

import pytest

from consistency.errors import NothingToCompare
from consistency.source import read_record
from recorder import RecordError, open_record, verify
from recorder.redact import Rules, redact_record
from replayer.diff import diff_records
from replayer.errors import ReplayError
from replayer.preconditions import check_values

sys.path.insert(0, str(Path(__file__).parent))
from agent_record import PICTURES, PROCESSOR, RESULTS, write_agent_record

from tests.command_line import printed

SECRET = "sk-abcdef0123456789abcdef0123"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def record(tmp_path_factory, model):
    """A record in which a tool returned a key."""
    results = ("32 pixels", f"the API_KEY={SECRET} of ACME-17")
    return write_agent_record(tmp_path_factory.mktemp("agents") / "record", results, model=model)


def redact(record, to, *options, code=0):
    return printed("record", "redact", record, "--to", to, *options, code=code)


def every_text(step):
    """All that a step says: its files, and its tokens decoded."""
    ids = step.batch(0)["input_ids"].tolist()
    return f"{step.text(0)} {step.calls(0)} {PROCESSOR.tokenizer.decode(ids)}"


def test_a_key_is_masked_in_texts_calls_and_tokens(record, tmp_path):
    assert SECRET in every_text(open_record(record).step(0))
    facts = json.loads(redact(record, tmp_path / "copy", "--json"))
    assert (facts["num_rows"], facts["steps_changed"], facts["num_images"]) == (1, [0], 4)
    copy = open_record(tmp_path / "copy").step(0)
    assert SECRET not in every_text(copy)
    assert "ACME-17" in every_text(copy)
    assert copy.calls(0)[0].calls[1].messages[1]["content"] == "the API_KEY=*** of ACME-17"
    before, after = open_record(record).step(0).batch(0), copy.batch(0)
    changed = before["input_ids"] != after["input_ids"]
    begin, end = before["cu_seqlens"][1:3]
    assert changed.nonzero()[0].min() >= begin
    assert changed.nonzero()[0].max() < end
    assert PROCESSOR.tokenizer.decode(before["input_ids"][changed].tolist()) == SECRET
    assert all((before[key] == after[key]).all() for key in before if key != "input_ids")
    assert copy.known(0, "input_ids").tolist() == [row != 1 for row in range(copy.num_rows(0))]
    with pytest.raises(
        ReplayError, match=r"input_ids is not known in 1 of \d rows of step 0; they are masked"
    ):
        check_values(open_record(tmp_path / "copy"), None, 0, 0)
    assert verify(tmp_path / "copy").intact
    assert open_record(tmp_path / "copy").header.environment["redacted"] is True


def test_patterns_are_masked_too(record, tmp_path):
    redact(record, tmp_path / "copy", "--pattern", "ACME-[0-9]+", "--pattern", "squ.re")
    text = every_text(open_record(tmp_path / "copy").step(0))
    assert not re.search("ACME|square", text)
    assert "32 pixels" in text


def test_a_record_without_secrets_has_the_same_bits(tmp_path, model):
    record = write_agent_record(tmp_path / "record", RESULTS, model=model)
    assert "0 matches masked" in redact(record, tmp_path / "copy")
    here, there = (open_record(folder).step(0) for folder in (record, tmp_path / "copy"))
    assert here.manifest.files == there.manifest.files
    assert [entry.tensors for entry in here.manifest.batches.values()] == [
        entry.tensors for entry in there.manifest.batches.values()
    ]


def test_texts_and_pictures_can_be_left_out(record, tmp_path):
    output = redact(record, tmp_path / "copy", "--without-text", "--without-images")
    assert "all texts and tokens left out" in output
    step = open_record(tmp_path / "copy").step(0)
    assert (step.text(0), step.calls(0), step.images(0)) == (None, None, None)
    assert set(step.batch(0)["input_ids"].tolist()) == {0}
    assert step.batch(0)["rewards"].tolist() == open_record(record).step(0).batch(0)["rewards"].tolist()
    copy = open_record(tmp_path / "copy")
    assert copy.header.lacks_images
    with pytest.raises(
        NothingToCompare, match="is a copy without the pictures of its rows: compare the original"
    ):
        read_record(copy, [0])
    with pytest.raises(ReplayError, match="is a copy without the pictures of its rows: replay the original"):
        check_values(copy, None, 0, 0)
    found = diff_records(open_record(record), copy)
    assert found.differences == ()
    assert found.not_known == ("input_ids of 4 of 4 rows in B", "pictures in B")
    assert verify(tmp_path / "copy").intact
    files = [path.read_bytes() for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in data or PICTURES[0] in data for data in files)


def test_all_tokens_between_are_masked_where_places_are_not_clear(record, tmp_path):
    opened = open_record(record)
    rules = Rules([re.compile("pixels.*?the", re.DOTALL), re.compile("e")])
    ticked = []
    redact_record(opened, tmp_path / "copy", rules, PROCESSOR.tokenizer.decode, ticked.append)
    assert ticked == [0]
    assert "e" not in open_record(tmp_path / "copy").step(0).calls(0)[0].calls[1].messages[1]["content"]
    with pytest.raises(RecordError, match="tokenizer"):
        redact_record(opened, tmp_path / "other", rules, None, ticked.append)
