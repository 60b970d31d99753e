"""Every format that people keep stacks in, from the shortest text that shows its peculiarities to the frames it holds."""

import io
import json
import tarfile

import pytest

from hangdoctor.errors import HangInputError
from hangdoctor.frames import last_name, main_thread, short_file
from hangdoctor.model import Frame, Thread
from hangdoctor.parse.names import ProcessName, parse_name
from hangdoctor.parse.read import parse_mapping, read_snapshot
from hangdoctor.parse.stacks_json import parse_stacks_json
from hangdoctor.parse.stacks_text import numbers_in, parse_stacks_text

C10D = "torch/distributed/distributed_c10d.py"


def only(text: str) -> list[Thread]:
    (section,) = parse_stacks_text(text)
    return section.threads


def test_pyspy_text_with_qualified_names_native_frames_and_a_nameless_thread():
    text = """Process 6755: /venv/bin/python -u a.py mix
Python v3.11.7 (/usr/bin/python3.11)

Thread 6755 (idle): "MainThread"
    0x7fcd980a3f16 (libc.so.6)
    gloo::transport::tcp::UnboundBuffer::waitRecv(int (*)(void*), (anonymous namespace)::T) (libtorch_cpu.so)
    recv (torch/distributed/distributed_c10d.py:3433)
    _exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
    <module> (a.py:39)
Thread 6790 (active+gil)
    helper (<frozen runpy>:88)
"""
    (section,) = parse_stacks_text(text)
    assert (section.pid, section.command) == (6755, "/venv/bin/python -u a.py mix")
    main, other = section.threads
    assert main == Thread(
        frames=(
            Frame("0x7fcd980a3f16", "libc.so.6", 0, True),
            Frame("gloo::transport::tcp::UnboundBuffer::waitRecv(int (*)(void*), (anonymous namespace)::T)", "libtorch_cpu.so", 0, True),
            Frame("recv", C10D, 3433),
            Frame("_exception_logger.<locals>.wrapper", "torch/distributed/c10d_logger.py", 83),
            Frame("<module>", "a.py", 39),
        ),
        name="MainThread",
        active=False,
        holds_gil=False,
    )  # fmt: skip
    assert other == Thread((Frame("helper", "<frozen runpy>", 88),), None, True, True)


def test_pyspy_text_of_the_first_years_with_tabs_hex_ids_and_colours():
    text = "Thread 0x7F5AB1F5E740 (active)\n\t\x1b[32mfoo\x1b[0m (\x1b[36mx.py\x1b[0m:\x1b[2m3\x1b[0m)\n\t<module> (x.py:9)\n"
    assert only(text) == [Thread((Frame("foo", "x.py", 3), Frame("<module>", "x.py", 9)), None, True, False)]


def test_main_thread_is_found_by_its_number_where_pyspy_lost_the_names():
    text = "Process 77: python t.py\nPython v3.14.0\n\nThread 99 (idle)\n    poll (x.py:1)\nThread 77 (idle)\n    main (t.py:3)\n"
    assert [thread.name for thread in only(text)] == [None, "MainThread"]


def test_children_of_one_process_follow_it(tmp_path):
    (tmp_path / "rank_0.txt").write_text(
        'Process 10: python t.py\nPython v3.11.7\n\nThread 10 (idle): "MainThread"\n    main (t.py:3)\n    <module> (t.py:9)\n'
        "-----------------\n"
        'Process 11: python t.py\nParent Process 10: python t.py\nPython v3.11.7\n\nThread 11 (idle): "MainThread"\n    work (w.py:4)\n'
    )
    dumps = read_snapshot([tmp_path]).dumps
    assert [(d.name, d.rank, d.role, d.parent, d.pid) for d in dumps] == [
        ("rank_0", 0, "trainer", None, 10),
        ("rank_0_child_0", None, "child", "rank_0", 11),
    ]


def test_faulthandler_has_innermost_first_and_no_names():
    text = """Timeout (0:02:00)!
Thread 0x00007f8c2b7fe700 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f8c40d4b740 (most recent call first):
  File "/job/train.py", line 12 in step
  File "/job/train.py", line 90 in <module>
"""
    threads = only(text)
    assert [thread.frames[0] for thread in threads] == [
        Frame("wait", "/usr/lib/python3.11/threading.py", 327),
        Frame("step", "/job/train.py", 12),
    ]
    assert main_thread(tuple(threads)) is threads[1]


def test_faulthandler_of_two_ranks_interleaved_in_one_log():
    text = """[rank0]: Thread 0x0000000000000001 (most recent call first):
[rank1]: Thread 0x0000000000000001 (most recent call first):
[rank1]:   File "/job/train.py", line 50 in load
[rank0]:   File "/job/train.py", line 60 in step
[rank1]:   File "/job/train.py", line 90 in <module>
[rank0]:   File "/job/train.py", line 90 in <module>
"""
    found = {section.ranks: section.threads[0].frames[0].function for section in parse_stacks_text(text)}
    assert found == {(0,): "step", (1,): "load"}


def test_torch_debug_server_concatenates_ranks():
    text = """=== Rank 0 ===
Thread 0x01 (most recent call first):
  File "/job/a.py", line 1 in f
=== Rank 1 ===
Thread 0x01 (most recent call first):
  File "/job/b.py", line 2 in g
"""
    assert [(s.ranks, s.threads[0].frames) for s in parse_stacks_text(text)] == [
        ((0,), (Frame("f", "/job/a.py", 1),)),
        ((1,), (Frame("g", "/job/b.py", 2),)),
    ]


def test_srun_labels_split_the_ranks():
    text = '0: Thread 5 (idle): "MainThread"\n1: Thread 6 (idle): "MainThread"\n0:     f (a.py:1)\n1:     g (b.py:2)\n'
    assert {s.ranks: s.threads[0].frames[0].function for s in parse_stacks_text(text)} == {
        (0,): "f",
        (1,): "g",
    }


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
    waiting, holding = only(text)
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


def test_gdb_backtrace_and_py_bt():
    text = """Thread 1 (Thread 0x7f1 (LWP 77) "python"):
#0  0x00007f in __futex_abstimed_wait (futex=0x0) from /lib/x86_64-linux-gnu/libc.so.6
#1  0x00005f in lock_PyThread_acquire_lock (self=<optimized out>) at Modules/_threadmodule.c:146
#5 Frame 0x7f1, for file /a/b.py, line 10, in main (x=3)
"""
    (thread,) = only(text)
    assert thread.frames == (
        Frame("__futex_abstimed_wait", "/lib/x86_64-linux-gnu/libc.so.6", 0, True),
        Frame("lock_PyThread_acquire_lock", "Modules/_threadmodule.c", 146, True),
        Frame("main", "/a/b.py", 10),
    )
    assert only('Traceback (most recent call first):\n  File "/a/b.py", line 3, in f\n    x.wait()\n')[
        0
    ].frames == (Frame("f", "/a/b.py", 3),)


def test_an_exception_in_a_log_is_no_stack_of_a_waiting_rank():
    assert (
        parse_stacks_text('Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: x\n')
        == []
    )


def test_watchdog_stack_of_the_failed_collective():
    text = 'Thread 1 (idle): "MainThread"\n#0 all_reduce from /v/torch/distributed/distributed_c10d.py:2501\n#1 main from /job/t.py:9\n'
    assert only(text)[0].frames == (
        Frame("all_reduce", "/v/torch/distributed/distributed_c10d.py", 2501),
        Frame("main", "/job/t.py", 9),
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


def test_pyspy_json_of_ranks_that_differ_in_numbers_only_share_their_threads():
    first, second = (
        parse_stacks_json(pyspy_json(10, "f", [12, 10])),
        parse_stacks_json(pyspy_json(20, "f", [23, 20])),
    )
    assert (first[0], second[0]) == (10, 20)
    assert first[1] is second[1]
    assert [thread.name for thread in first[1]] == [None, "MainThread"]
    assert first[1][0].frames == (Frame("f", "/v/site-packages/torch/x.py", 3),)


def test_pyspy_json_without_thread_numbers():
    pid, (thread,) = parse_stacks_json(pyspy_json(10, "f", [None]))
    assert (pid, thread.name, thread.holds_gil) == (10, None, True)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("rank_3.txt", ProcessName("rank_3", 3)),
        ("stack_rank12.native.txt", ProcessName("rank_12", 12)),
        ("host-2_rank_17.json", ProcessName("rank_17", 17, host="host-2")),
        ("engine_rank_1.txt", ProcessName("engine_rank_1", 1, "engine")),
        ("node1_sglang_rank-0.txt", ProcessName("engine_rank_0", 0, "engine")),
        ("rank_0_child_2.json", ProcessName("rank_0_child_2", None, "child", parent="rank_0")),
        ("nccl_trace_rank_5", ProcessName("rank_5", 5)),
        ("7.txt", ProcessName("rank_7", 7)),
        ("launcher.txt", ProcessName("launcher", None)),
    ],
)
def test_file_names_say_whose_dump_it_is(file, name):
    assert parse_name(file) == name


def test_rank_lists_of_headings():
    assert numbers_in("0-2, 5 and 7") == (0, 1, 2, 5, 7)


@pytest.mark.parametrize(
    ("function", "short"),
    [("Condition.wait", "wait"), ("deco.<locals>.wrapper", "wrapper"), ("f.<locals>.<lambda>", "<lambda>"),
        ("c10d::Work::wait", "c10d::Work::wait")],
)  # fmt: skip
def test_last_part_of_a_name(function, short):
    assert last_name(function) == short


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("/opt/venv/lib/python3.11/site-packages/torch/cuda/__init__.py", "torch/cuda/__init__.py"),
        ("/usr/lib/python3.11/threading.py", "threading.py"),
        ("/home/me/job/src/train.py", "job/src/train.py"),
        ("/home/me/src/megatron/core/x.py", "megatron/core/x.py"),
    ],
)
def test_paths_are_cut_to_what_is_the_same_on_every_host(path, short):
    assert short_file(path) == short


def test_a_tar_and_a_folder_of_one_collection_read_the_same(tmp_path):
    folder = tmp_path / "c"
    (folder / "samples/0").mkdir(parents=True)
    (folder / "proc/0").mkdir(parents=True)
    contents = {
        "format": "hangdoctor-collection", "version": 1, "world_size": 2, "hosts": [{"host": "b",
            "status": "unreachable", "detail": "no route"}],
        "samples": [{"time": 5.0}],
        "processes": [
            {"name": "rank_0", "rank": 0, "role": "trainer", "host": "a", "pid": 10, "parent": None,
                "status": "dumped", "detail": "", "command": "x"},
            {"name": "rank_1", "rank": 1, "role": "trainer", "host": "b", "pid": None, "parent": None,
                "status": "timed_out", "detail": "10 s", "command": ""},
        ],
    }  # fmt: skip
    (folder / "collection.json").write_text(json.dumps(contents))
    (folder / "samples/0/rank_0.json").write_text(pyspy_json(10, "f", [10]))
    (folder / "proc/0/rank_0.json").write_text(json.dumps({"state": "S", "wchan": "0", "cpu_s": 1.5}))
    with tarfile.open(tmp_path / "c.tar.gz", "w:gz") as tar:
        tar.add(folder, "c")
    snapshot = read_snapshot([folder])
    assert (
        read_snapshot([tmp_path / "c.tar.gz"]).expected == snapshot.expected == {0: "dumped", 1: "timed_out"}
    )
    (dump,) = snapshot.dumps
    assert (dump.name, dump.host, dump.time, dump.facts.state, dump.facts.wchan, dump.facts.cpu_s) == (
        "rank_0",
        "a",
        5.0,
        "S",
        None,
        1.5,
    )
    assert snapshot.notes == ("host b: unreachable no route",)


def test_a_native_pass_is_laid_under_the_python_frames_it_belongs_to(tmp_path):
    (tmp_path / "rank_0.json").write_text(pyspy_json(10, "f", [10]))
    (tmp_path / "rank_0.native.txt").write_text(
        'Process 10: x\n\nThread 10 (idle): "MainThread"\n    clock_nanosleep (libc.so.6)\n    f (torch/x.py:3)\n'
    )
    (dump,) = read_snapshot([tmp_path]).dumps
    assert [frame.function for frame in dump.threads[0].frames] == ["clock_nanosleep", "f"]


def test_a_mapping_gives_ranks_to_files_without_a_name(tmp_path):
    (tmp_path / "left.txt").write_text("Thread 1 (idle)\n    f (a.py:1)\n")
    (tmp_path / "right.txt").write_text("Thread 1 (idle)\n    g (a.py:2)\n")
    mapping = parse_mapping("left.txt 4  # the first host\nright.txt = engine_rank_1\n")
    assert {d.name for d in read_snapshot([tmp_path], mapping=mapping).dumps} == {"rank_4", "engine_rank_1"}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "No stacks of any rank"),
        ({"notes.md": "nothing here"}, "Looked for py-spy text"),
        (
            {"collection.json": '{"format": "hangdoctor-collection", "version": 9}'},
            "version 9 and this program reads 1",
        ),
        ({"collection.json": '{"format": "zip"}'}, "is not hangdoctor's"),
    ],
)
def test_input_that_is_no_use_says_what_is_wrong(tmp_path, files, says):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(HangInputError, match=says):
        read_snapshot([tmp_path])


def test_a_member_that_points_out_of_the_tar_is_read_in_memory_and_written_nowhere(tmp_path):
    path = tmp_path / "evil.tar.gz"
    data = b"Thread 1 (idle)\n    f (a.py:1)\n"
    with tarfile.open(path, "w:gz") as tar:
        for name, kind in (("../../rank_0.txt", tarfile.REGTYPE), ("/etc/rank_1.txt", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = (
                kind,
                len(data) if kind == tarfile.REGTYPE else 0,
                "/etc/passwd",
            )
            tar.addfile(info, io.BytesIO(data) if kind == tarfile.REGTYPE else None)
    before = sorted(tmp_path.rglob("*"))
    assert [d.rank for d in read_snapshot([path]).dumps] == [0]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_truncated_tar_gives_what_comes_before_the_damage(tmp_path):
    path = tmp_path / "cut.tar"
    with tarfile.open(path, "w") as tar:
        for rank in range(2):
            data = f"Thread 1 (idle)\n    f (a.py:{rank + 1})\n".encode()
            info = tarfile.TarInfo(f"rank_{rank}.txt")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    path.write_bytes(path.read_bytes()[:1540])
    snapshot = read_snapshot([path])
    assert [d.rank for d in snapshot.dumps] == [0]
    assert "damaged" in snapshot.notes[0]


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
    ],
)
def test_headings_that_people_write_above_a_stack(heading, ranks):
    assert [section.ranks for section in parse_stacks_text(f"{heading}\n{STACK}")] == [ranks]


def test_prose_about_a_rank_opens_nothing():
    assert [section.ranks for section in parse_stacks_text(f"rank 3 finished in 2 s\n{STACK}")] == [()]


def test_equal_stacks_posted_once_with_a_count_become_that_many_ranks(tmp_path):
    (tmp_path / "post.txt").write_text(f"3 in:\n{STACK}\n1 in:\n{STACK.replace('f (', 'g (')}")
    snapshot = read_snapshot([tmp_path])
    assert [(d.rank, d.threads[0].frames[0].function) for d in snapshot.dumps] == [
        (0, "f"),
        (1, "f"),
        (2, "f"),
        (3, "g"),
    ]
    assert "numbered in the order" in snapshot.notes[0]


def test_a_folder_may_carry_the_rank(tmp_path):
    for rank in (0, 7):
        (tmp_path / f"rank_{rank}").mkdir()
        (tmp_path / f"rank_{rank}/stacks.txt").write_text(STACK)
    assert [d.rank for d in read_snapshot([tmp_path]).dumps] == [0, 7]


def test_engines_are_numbered_by_their_process_names(tmp_path):
    text = "".join(f"Process {9 - tp}: sglang::scheduler_TP{tp}\nPython v3.12\n\n{STACK}" for tp in (1, 0))
    (tmp_path / "watchdog.txt").write_text(text)
    assert {d.rank: d.pid for d in read_snapshot([tmp_path]).dumps} == {0: 9, 1: 8}


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (
            "Error: Failed to get process executable name. Check that the process is running.\n\nStack backtrace:\n",
            "gone",
        ),
        ("Error: Failed to find python version from target process\n", "not_python"),
        (
            "Permission Denied: Try running again with elevated permissions by going 'sudo env \"PATH=$PATH\" !!'\n",
            "not_permitted",
        ),
        (
            "Process 7: python t.py\nPython v3.11.7\n\nError: Failed to suspend process\n\nCaused by:\n    unexpected waitpid result\n",
            "stopped",
        ),
    ],
)
def test_error_texts_of_pyspy_are_a_status_of_their_rank(tmp_path, text, status):
    (tmp_path / "rank_0.txt").write_text(STACK)
    (tmp_path / "rank_1.txt").write_text(text)
    assert read_snapshot([tmp_path]).expected == {0: "dumped", 1: status}


def test_stacks_in_a_folder_called_logs_are_stacks(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank_3.log").write_text(f"step 4\n{STACK}")
    snapshot = read_snapshot([tmp_path])
    assert [(d.rank, d.threads[0].frames[0].function) for d in snapshot.dumps] == [(3, "f")]
    assert snapshot.logs[0].rank == 3


def test_a_log_that_starts_with_a_bracket_is_no_json(tmp_path):
    (tmp_path / "all.log").write_text('[rank0]: Thread 1 (idle): "MainThread"\n[rank0]:     f (a.py:1)\n')
    assert [d.rank for d in read_snapshot([tmp_path]).dumps] == [0]
