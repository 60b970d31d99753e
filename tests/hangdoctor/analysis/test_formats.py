"""Every stack format: the shortest text that shows its peculiarities, and its frames."""

import json
from pathlib import Path

import pytest

from hangdoctor.diagnose import diagnose
from hangdoctor.errors import UnreadableDump
from hangdoctor.model import Frame
from hangdoctor.parse.read import read_snapshot
from hangdoctor.parse.stacks_json import parse_stacks_json
from hangdoctor.parse.stacks_text import parse_stacks_text
from tests.hangdoctor.analysis.written import frame, thread

C10D = "torch/distributed/distributed_c10d.py"


def test_pystack_is_turned_round_and_says_who_waits_for_the_gil():
    text = """Traceback for thread 12 (python) [Waiting for the GIL] (most recent call last):
    (Python) File "/a/b.py", line 10, in <module>
        main()
    (Python) File "/a/b.py", line 8, in main
        x.wait()
    (C) File "Python/ceval_gil.h", line 57, in take_gil (/usr/bin/python3.11)

Traceback for thread 13 (worker) [Has the GIL] (most recent call last):
    (Python) File "/a/w.py", line 3, in run
        decode()
"""
    (section,) = parse_stacks_text(text)
    waiting, holding = section.threads
    assert waiting.frames == (
        Frame("take_gil (/usr/bin/python3.11)", "Python/ceval_gil.h", 57, True),
        Frame("main", "/a/b.py", 8),
        Frame("<module>", "/a/b.py", 10),
    )
    assert (waiting.waits_for_gil, waiting.holds_gil, holding.holds_gil, holding.name) == (
        True,
        False,
        True,
        "worker",
    )


def test_an_exception_in_a_log_is_no_stack_of_a_waiting_rank():
    error = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: x\n'
    assert parse_stacks_text(error) == []


def pyspy_json(pid: int, function: str, os_ids: list[int | None]) -> str:
    return json.dumps([thread([frame(function)], pid, os_id, None, gil=True) for os_id in os_ids])


@pytest.mark.parametrize("change", [("10", "x"), ('"pid": 10', '"pid": 10 7'), ("}]", "}"), ('"f"', '"f')])
def test_pyspy_json_like_the_last_one_and_damaged_is_refused(change):
    text = pyspy_json(10, "f", [12, 10])
    parse_stacks_json(text)
    with pytest.raises(UnreadableDump):
        parse_stacks_json(text.replace(*change))


def test_a_native_pass_is_laid_under_the_python_frames_it_belongs_to(tmp_path):
    (tmp_path / "rank_0.json").write_text(pyspy_json(10, "f", [10]))
    (tmp_path / "rank_0.native.txt").write_text(
        'Process 10: x\n\nThread 10 (idle): "MainThread"\n    clock_nanosleep (libc.so.6)\n    f (torch/x.py:3)\n'
    )
    (dump,) = read_snapshot([tmp_path]).dumps
    assert [frame.function for frame in dump.threads[0].frames] == ["clock_nanosleep", "f"]


STACK = 'Thread 1 (idle): "MainThread"\n    f (a.py:1)\n'


@pytest.mark.parametrize(
    ("heading", "ranks"),
    [
        ("=== Rank 3 ===", (3,)),
        ("[rank 3]", (3,)),
        ("Ranks 0-2, 5:", (0, 1, 2, 5)),
        ("**Rank 1**", (1,)),
        ("py-spy dump of rank 4 (pid 77):", (4,)),
        ("# stack of rank 6 on host node-1", (6,)),
        ("Rank 2 stack:", (2,)),
        ("rank 3 finished in 2 s", ()),
    ],
)
def test_headings_that_people_write_above_a_stack(heading, ranks):
    assert [section.ranks for section in parse_stacks_text(f"{heading}\n{STACK}")] == [ranks]


AR = Frame("all_reduce", C10D, 2806)
BAR = Frame("barrier", C10D, 3703)
STEP = Frame("step", "train.py", 60)
SAVE = Frame("save", "train.py", 80)
ENTRY = Frame("<module>", "train.py", 99)
# Each paste shows rank 0 in the step and rank 1 in the save.
PASTES = dict(
    block.split("\n", 1)
    for block in Path(__file__).with_name("pastes.txt").read_text(encoding="utf-8").split("##### ")[1:]
)


@pytest.mark.parametrize("name", PASTES)
def test_every_way_to_paste_two_ranks(name):
    found = {section.ranks: section.threads[0].frames for section in parse_stacks_text(PASTES[name])}
    without_entry = {ranks: tuple(f for f in frames if f != ENTRY) for ranks, frames in found.items()}
    assert without_entry == {(0,): (AR, STEP), (1,): (BAR, SAVE)}


@pytest.mark.parametrize(
    "line",
    [
        "step 12 (epoch 3) loss 0.5 (avg 0.6)",
        "WARNING: file missing (config.yaml)",
        "Saving checkpoint (rank 0)",
        "2025-01-02 10:00:00 INFO train.py:12 warning",
        "Rank 0 finished: 100 of 100",
        "loss -> 0.5 -> 0.4",
        "thread pool exhausted, 3 waiting",
    ],
)
def test_prose_and_logs_are_no_stacks(line):
    assert parse_stacks_text(f"{line}\n{line}\n") == []


def test_positions_of_one_kind_are_ranks_and_arrows_point_out_of_a_wait(tmp_path):
    """A range of positions, a stack on one line whose first call is the one that waits."""
    (tmp_path / "paste.txt").write_text(
        "py-spy, four ranks:\n\n- TP0: `all_reduce → check_cache → get_next_batch → event_loop`\n"
        "- TP1-3: `broadcast → broadcast_pyobj → recv_requests → event_loop` (next iteration)\n"
    )
    snapshot = read_snapshot([tmp_path])
    assert [(d.rank, d.threads[0].frames[0].function) for d in snapshot.dumps] == [
        (0, "all_reduce"), (1, "broadcast"), (2, "broadcast"), (3, "broadcast"),
    ]  # fmt: skip
    assert diagnose(snapshot).label == "collective_mismatch"


@pytest.mark.parametrize(
    ("log", "culprits"),
    [
        (
            "Stalled ops: grads_4 [ready ranks: 0], model_1_grads_4 [ready ranks: 1] are waiting for remainder of ranks",
            (0, 1),
        ),
        (
            "   [2] finished collective #4, but didn't join collective #5\n - Timeout at collective: ALLREDUCE, #5",
            (2,),
        ),
    ],
)
def test_records_in_a_log_without_stacks_are_a_diagnosis(tmp_path, log, culprits):
    (tmp_path / "paste.txt").write_text(log)
    assert diagnose(read_snapshot([tmp_path])).culprit_ranks == culprits


def test_a_peer_whose_log_ends_in_a_traceback_is_the_culprit(tmp_path):
    (tmp_path / "rank_0.txt").write_text(f"    all_reduce ({C10D}:2806)\n    step (train.py:60)\n")
    (tmp_path / "rank_1.log").write_text(
        'Traceback (most recent call last):\n  File "w.py", line 3, in main\n    f()\nOSError: gone\n'
    )
    diagnosis = diagnose(read_snapshot([tmp_path], 2))
    assert (diagnosis.label, diagnosis.culprit_ranks) == ("partial_exception", (1,))
