"""JSON from outside is parsed within limits of size, number, depth and spelling."""

import time
import tracemalloc

import pytest

from recorder import DamagedRecord
from recorder.documents import (
    MAX_JSON_BYTES,
    checksummed_bytes,
    parse_checksummed,
    parse_document,
    parse_json,
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "a": 2}', "a member is there twice"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON .Exceeds the limit"),
        (b"[" * 65 + b"]" * 65, "is nested more than 64 deep"),
        (b"[" * 100_000 + b"]" * 100_000, "is not JSON|is nested"),
        (b'{"a": "\xff"}', "is not JSON .'utf-8' codec"),
        (b"{} {}", "is not JSON .Extra data"),
        (b"[[],[],", "is not JSON"),
        (b" " * (MAX_JSON_BYTES + 1), "67108865 bytes"),
        (b"[" + b"[]," * 1_500_000 + b"[]]", "3000002 values"),
    ],
)
def test_what_is_beyond_a_limit_is_damage_and_costs_little(text, message):
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(DamagedRecord, match=message):
        parse_json(text, "x.json")
    assert time.process_time() - begin < 2
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


def test_64_levels_and_numbers_of_any_spelling_are_read():
    assert parse_json(b"[" * 64 + b"]" * 64, "x") is not None
    assert parse_json(b'{"a": 1e-06, "b": {"float": "inf"}, "c": [1, -2]}', "x") == {
        "a": 1e-06,
        "b": float("inf"),
        "c": [1, -2],
    }


def test_a_lone_surrogate_becomes_the_replacement_character_and_a_pair_stays():
    assert parse_json(b'{"path": "a\\ud800b", "text": "\\ud83d\\ude00"}', "x") == {
        "path": "a\ufffdb",
        "text": "\U0001f600",
    }
    written = checksummed_bytes({"path": "caf\udce9"})  # a path that is not UTF-8
    assert parse_checksummed(written, "x") == {"path": "caf\ufffd"}


def test_a_document_is_an_object():
    with pytest.raises(DamagedRecord, match=r"x: is \[1\], expected an object"):
        parse_document(b"[1]", "x")
