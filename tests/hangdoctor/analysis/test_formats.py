"""Every stack format: the shortest text that shows its peculiarities, and its frames."""

import json

import pytest

from hangdoctor.diagnose import diagnose
from hangdoctor.errors import UnreadableDump
from hangdoctor.model import Frame
from hangdoctor.parse.read import read_snapshot
from hangdoctor.parse.stacks_json import parse_stacks_json
from hangdoctor.parse.stacks_text import parse_stacks_text

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
    assert (
        parse_stacks_text('Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: x\n')
        == []
    )


def pyspy_json(pid: int, function: str, os_ids: list[int | None]) -> str:
    frame = {
        "name": function,
        "filename": "/v/site-packages/torch/x.py",
        "module": None,
        "short_filename": "torch/x.py",
        "line": 3,
        "locals": None,
    }
    return json.dumps(
        [{"pid": pid, "thread_id": 1, "thread_name": None, "os_thread_id": os_id, "active": False, "owns_gil": True,
            "frames": [frame]} for os_id in os_ids]
    )  # fmt: skip


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
IN_STEP = f"    all_reduce ({C10D}:2806)\n    step (train.py:60)\n"
IN_SAVE = f"    barrier ({C10D}:3703)\n    save (train.py:80)\n"


def interleaved(first: str, second: str) -> str:
    """Return the two stacks line by line, each line with the prefix of its process."""
    pairs = zip(IN_STEP.splitlines(), IN_SAVE.splitlines(), strict=True)
    return "".join(f"{first}{a}\n{second}{b}\n" for a, b in pairs)


# Each paste shows rank 0 in the step and rank 1 in the save.
PASTES = {
    "comments": f"# Rank 0\n{IN_STEP}\n# Rank 1\n{IN_SAVE}",
    "state and rank": f"idle: rank 0\n{IN_STEP}idle: rank 1\n{IN_SAVE}",
    "rank and state": f"rank 0 (idle):\n{IN_STEP}rank 1 is idle\n{IN_SAVE}",
    "remarks behind frames": f"rank 0\n    all_reduce ({C10D}:2806)   \u2190 here\n    step (train.py:60)  <-- ours\nrank 1\n{IN_SAVE}",
    "quoted mail": "".join(f"> {line}\n" for line in f"rank 0:\n{IN_STEP}rank 1:\n{IN_SAVE}".splitlines()),
    "cut paths": "rank 0:\n  all_reduce (distributed_c10d.py:2806)\n  step (train.py:60)\n"
    "rank 1:\n  barrier (distributed_c10d.py:3703)\n  save (train.py:80)\n",
    "file first": "rank 0:\n  distributed_c10d.py:2806 all_reduce\n  train.py:60 in step\n"
    "rank 1:\n  distributed_c10d.py:3703: barrier()\n  train.py(80) save\n",
    "name first": "rank 0:\n  all_reduce at distributed_c10d.py:2806\n  step() @ train.py:60\n"
    "rank 1:\n  barrier in distributed_c10d.py, line 3703\n  save - train.py:80\n",
    "bullets": "rank 0:\n- `all_reduce (distributed_c10d.py:2806)`\n- `step (train.py:60)`\n"
    "rank 1:\n1. barrier (distributed_c10d.py:3703)\n2. save (train.py:80)\n",
    "tree": "rank 0\n\u251c\u2500 all_reduce (distributed_c10d.py:2806)\n\u2514\u2500 step (train.py:60)\n"
    "rank 1\n\u251c\u2500 barrier (distributed_c10d.py:3703)\n\u2514\u2500 save (train.py:80)\n",
    "one line": "rank 0: all_reduce (distributed_c10d.py:2806) <- step (train.py:60)\n"
    "rank 1: save (train.py:80) -> barrier (distributed_c10d.py:3703)\n",
    "table": f"| rank 0 | all_reduce ({C10D}:2806) <- step (train.py:60) |\n"
    f"| rank 1 | barrier ({C10D}:3703) <- save (train.py:80) |\n",
    "short": f"R0:\n{IN_STEP}R1:\n{IN_SAVE}",
    "local ranks": f"local_rank 0:\n{IN_STEP}local rank 1:\n{IN_SAVE}",
    "rank in place of a thread": f'rank0 (idle): "MainThread"\n{IN_STEP}rank1 (idle): "MainThread"\n{IN_SAVE}',
    "GPU": f"GPU 0:\n{IN_STEP}GPU 1:\n{IN_SAVE}",
    "stage": f"Stage 0\n{IN_STEP}Stage 1\n{IN_SAVE}",
    "slash of the world": f"rank 0/2:\n{IN_STEP}rank 1 of 2:\n{IN_SAVE}",
    "list": f"ranks [0]:\n{IN_STEP}Rank #1\n{IN_SAVE}",
    "thread headings": f'rank 0\nThread: "MainThread"\n{IN_STEP}rank 1\nThread (idle): "MainThread"\n{IN_SAVE}',
    "torchrun": interleaved("[rank0]: ", "[rank1]: "),
    "srun": interleaved("0: ", "1: "),
    "mpirun": interleaved("[1,0]<stdout>:", "[1,1]<stdout>:"),
    "docker compose": interleaved("trainer-0  | ", "trainer-1  | "),
    "debug server": f"=== Rank 0: node-1:41000 ===\nThread 0x01 (most recent call first):\n  File \"{C10D}\", line 2806 in all_reduce\n"
    f"  File \"train.py\", line 60 in step\n=== Rank 1: node-1:41001 ===\nThread 0x01 (most recent call first):\n"
    f"  File \"{C10D}\", line 3703 in barrier\n  File \"train.py\", line 80 in save\n",
    "gdb and py-bt": f"rank 0:\n(gdb) py-bt\nTraceback (most recent call first):\n"
    f"  File \"{C10D}\", line 2806, in all_reduce\n    work.wait()\n"
    f"  File \"train.py\", line 60, in step\nrank 1:\n#1 Frame 0x7f1, for file {C10D}, line 3703, in barrier ()\n"
    "#2 Frame 0x7f2, for file train.py, line 80, in save ()\n",
    "outermost first": f"rank 0:\n<module> (train.py:99)\nstep (train.py:60)\nall_reduce ({C10D}:2806)\nrank 1:\n{IN_SAVE}",
    "interrupted": f"rank 0:\n{IN_STEP}rank 1:\n^CTraceback (most recent call last):\n  File \"train.py\", line 80, in save\n"
    f"    dist.barrier()\n  File \"{C10D}\", line 3703, in barrier\n    work.wait()\nKeyboardInterrupt\n",
    "format_stack": f"rank 0:\n# ThreadID: 1407 MainThread\nFile: \"train.py\", line 99, in <module>\n  step()\n"
    f"File: \"train.py\", line 60, in step\nFile: \"{C10D}\", line 2806, in all_reduce\nrank 1:\n{IN_SAVE}",
    "log lines between": f"step 12 loss 0.5 (avg 0.6)\nrank 0 (idle):\n{IN_STEP}"
    f"2025-01-02 10:00:00 INFO train.py:12 epoch\nrank 1 (idle):\n{IN_SAVE}",
    "watchdog": f"[Rank 0] Stack trace of the failed collective:\n#0 all_reduce from {C10D}:2806\n#1 step from train.py:60\n"
    f"[Rank 1] Stack trace of the failed collective:\n#0 barrier from {C10D}:3703\n#1 save from train.py:80\n",
}  # fmt: skip


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
    (tmp_path / "rank_0.txt").write_text(IN_STEP)
    (tmp_path / "rank_1.log").write_text(
        'Traceback (most recent call last):\n  File "w.py", line 3, in main\n    f()\nOSError: gone\n'
    )
    diagnosis = diagnose(read_snapshot([tmp_path], 2))
    assert (diagnosis.label, diagnosis.culprit_ranks) == ("partial_exception", (1,))
