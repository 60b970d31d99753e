"""Sources that exhaust or surprise an importer: each ends with one sentence, in seconds."""

import os
import pickle
import struct
import time

import msgpack
import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from recorder import RecordError
from recorder.trainers.unpickle import load_bytes
from tests.command_line import printed

from . import pickled

SECONDS = 60


def pairs(depth: int) -> bytes:
    """The opcodes of nested pairs, each twice the one before: 2**depth values when unfolded."""
    value = ()
    for _ in range(depth):
        value = (value, value)
    return pickle.dumps(value, 2)[2:-1]


def refusal(source, format_name, folder):
    """Import in a verb; return the sentence, which must come in time and leave nothing."""
    started_at = time.monotonic()
    chosen = ["--from", format_name] if format_name else []
    text = printed("record", "import", source, "--to", folder / "record", *chosen, code=2)
    assert time.monotonic() - started_at < SECONDS
    assert not [name for name in os.listdir(folder) if "record" in name]
    assert len(text.splitlines()) == 1, text
    assert text.isprintable() or text[:-1].isprintable()
    return text


@pytest.mark.parametrize("name", ["slime", "areal", "xtuner", "verl", "roll", "skyrl"])
def test_nested_pairs_are_refused_at_once(tmp_path, name):
    data = b"\x80\x02" + pairs(40) + b"."
    assert len(data) < 400
    started_at = time.thread_time()  # threads of other tests count in the time of the process
    with pytest.raises(RecordError, match="far more values"):
        load_bytes(data, "it")
    assert time.thread_time() - started_at < 1
    (tmp_path / "0.pt").write_bytes(data)
    refusal(tmp_path / "0.pt", name, tmp_path)


@pytest.mark.long
def test_a_key_whose_hash_takes_for_ever_is_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_DEBUG_TIME_S", "2")
    (tmp_path / "0.pt").write_bytes(b"\x80\x02}" + pairs(60) + b"K\x01s.")
    assert "more than 2 s of CPU time" in refusal(tmp_path / "0.pt", "slime", tmp_path)


def test_a_tensor_without_strides_takes_no_memory(tmp_path):
    torch.save({"rollout_id": 0, "samples": torch.zeros(1).expand(50_000, 50_000)}, tmp_path / "0.pt")
    assert "a storage of 1" in refusal(tmp_path / "0.pt", "slime", tmp_path)
    torch.save({"rollout_id": 0, "samples": [torch.zeros(1).expand(8)]}, tmp_path / "0.pt")
    assert "a storage of" not in refusal(tmp_path / "0.pt", "slime", tmp_path)


def test_lengths_that_lie_are_refused(tmp_path):
    source = tmp_path / "rank_0.bin"
    for data in (
        b"\xdd\xff\xff\xff\xff",  # a list of 2**32 values
        b"\xdf\xff\xff\xff\xff\x01",
        b"\xc6\xff\xff\xff\xffabc",
        b"\x91" * 100_000,
        b"\x81\x90\x01",  # a list as a key
        b"\x93\x01\x02\x03",
    ):
        source.write_bytes(data)
        refusal(source, "prime-rl", tmp_path)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("slime", "0.pt"),
        ("prime-rl", "rank_0.bin"),
        ("nemo-rl", "train_data_step1.jsonl"),
        ("verl-text", "1.jsonl"),
        ("trl", "completions_00001.parquet"),
    ],
)
def test_a_sparse_file_takes_no_memory(tmp_path, name, file):
    (tmp_path / file).touch()
    os.truncate(tmp_path / file, 10**12)
    assert "memory" in refusal(tmp_path / file, name, tmp_path)


def test_a_file_cannot_name_another_of_the_user(tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "1.jsonl").write_text(
        '{"input": "TOP", "output": "SECRET", "score": 1, "step": 1}\n'
    )
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "1.jsonl").symlink_to(tmp_path / "secret" / "1.jsonl")
    assert "Permission denied" in refusal(tmp_path / "dump", "verl-text", tmp_path)


def test_zip_entries_may_overlap_and_still_take_no_memory(tmp_path):
    """Many storages in one file of `torch.save` that are the same bytes."""
    torch.save({"rollout_id": 0, "samples": [torch.zeros(1 << 20) for _ in range(3)]}, tmp_path / "0.pt")
    data = bytearray((tmp_path / "0.pt").read_bytes())
    at = data.rfind(b"PK\x01\x02")
    data[at + 42 : at + 46] = struct.pack("<I", 2**31)
    (tmp_path / "0.pt").write_bytes(data)
    refusal(tmp_path / "0.pt", "slime", tmp_path)


def test_a_zip_file_that_names_a_place_before_its_start_is_one_sentence(tmp_path):
    torch.save({"rollout_id": 0, "samples": []}, tmp_path / "0.pt")
    data = bytearray((tmp_path / "0.pt").read_bytes())
    at = data.rfind(b"PK\x05\x06")  # the end of the zip: size and place of its directory
    directory = data[data.find(b"PK\x01\x02") : at]
    (tmp_path / "0.pt").write_bytes(b"PK\x03\x04" + directory + data[at:])
    assert "Invalid argument" not in refusal(tmp_path / "0.pt", None, tmp_path)


def write_completions(folder, **columns):
    table = {"step": [1], "prompt": ["a"], "completion": ["b"], "advantage": [0.0]} | columns
    parquet.write_table(pyarrow.table(table), folder / "completions_00001.parquet", compression="zstd")
    return folder / "completions_00001.parquet"


def repeated(text, count):
    """A column of a few bytes that repeats a text."""
    return pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(np.zeros(count, np.int32)), pyarrow.array([text])
    )


def test_parquet_that_unfolds_is_refused(tmp_path):
    names = ("step", "prompt", "completion", "advantage")
    file = write_completions(tmp_path, **{name: repeated("x", 200_000) for name in names})
    assert "200000 rows" in refusal(file, "trl", tmp_path)
    long = dict.fromkeys(names, repeated("x", 10_000)) | {"prompt": repeated("x" * 500_000, 10_000)}
    file = write_completions(tmp_path, **long)
    assert file.stat().st_size < 10_000
    assert "memory" in refusal(file, "trl", tmp_path)


def test_names_of_files_are_printed_without_escape_codes(tmp_path):
    (tmp_path / "run").mkdir()
    source = pickled.write_xtuner(tmp_path / "run")
    folder = source / "\x1b]0;title\x07"
    folder.mkdir()
    (folder / "debug_rollout_3.pt").write_bytes(b"PK\x03\x04")
    text = printed("record", "import", source, "--to", tmp_path / "record")
    assert "debug_rollout_3.pt is cut off" in text
    assert "\x1b" not in text


def test_a_layout_of_prime_rl_that_lies_is_refused(tmp_path):
    file = tmp_path / "rank_0.bin"
    for row in (
        [[1, 2], [True, True], [0.5], [0.0, 0.0], [0, 1], 1.0],  # one advantage for two tokens
        [[1, 2], [True, True], [0.5, 0.5], [0.0, 0.0], [5, 6], 1.0],  # no sequence begins
        [[1, 2], [True, True], [0.5, 0.5], [0.0, 0.0], [0, 1], *[None] * 30],
        [[-1, 2], [True, True], [0.5, 0.5], [0.0, 0.0], [0, 1], 1.0],
    ):
        file.write_bytes(msgpack.packb([row]))
        assert "micro-batch 0" in refusal(file, "prime-rl", tmp_path)
