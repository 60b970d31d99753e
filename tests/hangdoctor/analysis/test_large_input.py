"""What makes large inputs fast: numbers cut out by their places, no search for cycles."""

import gc
import json

import pytest

from hangdoctor.diagnose import diagnose
from hangdoctor.model import ProcessDump, Snapshot
from hangdoctor.parse import location
from hangdoctor.parse.read import read_snapshot
from hangdoctor.parse.stacks_json import RECENT, parse_stacks_json


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


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_before_a_diagnosis(enabled, tmp_path):
    (tmp_path / "rank_0.json").write_text(stacks(0))
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        diagnose(read_snapshot([tmp_path]))
        with pytest.raises(ValueError, match="not a folder"):
            read_snapshot([tmp_path / "absent"])
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_no_cycles_are_searched_for_while_many_ranks_are_diagnosed():
    dumps = tuple(
        ProcessDump(f"rank_{rank}", rank, threads=parse_stacks_json(stacks(0))[1]) for rank in range(20_000)
    )
    searches = []
    gc.callbacks.append(lambda phase, details: searches.append(phase))
    try:
        assert len(diagnose(Snapshot(dumps)).ranks) == 20_000
    finally:
        gc.callbacks.pop()
    assert len(searches) <= 2  # the beginning and the end of the one that was due before


@pytest.mark.parametrize("digits", [1, 5, 15, 18])
def test_numbers_of_any_size_are_cut_out(digits):
    for thread_id in (10 ** (digits - 1), 10**digits - 99):
        pid, (thread,) = parse_stacks_json(stacks(7, thread_id=thread_id))
        assert pid == 107
        assert [frame.line for frame in thread.frames] == [3906, 88, 310]


def test_a_document_of_the_same_size_with_another_line_is_another_stack():
    RECENT.clear()
    for _ in range(2):  # the second time by its layout
        for line in (88, 89):
            _, (thread,) = parse_stacks_json(stacks(7, line=line))
            assert thread.frames[1].line == line
    pid, _ = parse_stacks_json(stacks(7).replace('"pid": 107', '"pid":   7'))
    assert pid is None


@pytest.mark.parametrize(
    "name", ["rank_3.json", "rank_0017.json", "rank_12345678.json", "Rank_3.json", "rank_3.txt"]
)
def test_the_usual_name_means_the_same_as_by_the_rules_of_all_names(name, monkeypatch):
    quick = location.parse_name.__wrapped__(name)
    monkeypatch.setattr(location, "PLAIN", location.re.compile("(?!)"))
    assert location.parse_name.__wrapped__(name) == quick
