"""What makes large inputs fast: numbers are cut out of equal stacks by their places."""

import json

import pytest

from hangdoctor.parse.stacks_json import parse_stacks_json


def stacks(rank: int, line: int = 88, thread_id: int = 140_000_000_000_000) -> str:
    """Return what py-spy prints for a rank in an all_reduce."""
    frames = [
        {"name": name, "filename": file, "module": None, "short_filename": file, "line": at, "locals": None}
        for name, file, at in (
            ("all_reduce", "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3906),
            ("clip", "/job/train.py", line),
            ("<module>", "/job/train.py", 310),
        )
    ]
    return json.dumps(
        [{"pid": 100 + rank, "thread_id": thread_id + rank, "thread_name": "MainThread", "os_thread_id": 100 + rank,
          "active": False, "owns_gil": False, "frames": frames}], indent=2)  # fmt: skip


@pytest.mark.parametrize("digits", [1, 5, 15, 18])
def test_numbers_of_any_size_are_cut_out(digits):
    for thread_id in (10 ** (digits - 1), 10**digits - 99):
        pid, (thread,) = parse_stacks_json(stacks(7, thread_id=thread_id))
        assert pid == 107
        assert [frame.line for frame in thread.frames] == [3906, 88, 310]


def test_a_document_of_the_same_size_with_another_line_is_another_stack():
    for line in (88, 89):
        _, (thread,) = parse_stacks_json(stacks(7, line=line))
        assert thread.frames[1].line == line
    pid, _ = parse_stacks_json(stacks(7).replace('"pid": 107', '"pid":   7'))
    assert pid is None
