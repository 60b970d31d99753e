"""Mutated dumps of every format: no crash, no hang, no code executed, no injection."""

import json
import pickle
import random
import re
import tarfile
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from areal_debug.hang.html import page
from areal_debug.hang.render import report
from hangdoctor.diagnose import diagnose
from hangdoctor.errors import HangInputError
from hangdoctor.parse.assemble import Reading, finish
from hangdoctor.parse.members import members_of
from hangdoctor.parse.read import read_snapshot, take
from tests.fuzz.inputs import Mutator, apply
from tests.hangdoctor.analysis.written import collection, entry, flight_recorder, frame, process, thread

STACK = 'Process 1: x\n\nThread 1 (idle): "MainThread"\n    f (x.py:3)\n'
CASES = Path(__file__).parent / "cases"
ESCAPES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def seeds() -> list[tuple[str, bytes]]:
    """One file of each format, by the name under which it would lie in a collection."""
    stack = [thread([frame("f")] * 3, 1, 1)] * 3
    recorder = flight_recorder([entry(1, done=False)] * 3, "[0, 1]")
    contents = collection([process("rank_0", 0)], world_size=2)
    texts = [("loose.txt", path.read_bytes()) for path in sorted(CASES.glob("*.txt"))[:6]]
    return [
        *texts,
        ("samples/0/rank_0.json", json.dumps(stack, indent=1).encode()),
        ("samples/0/rank_1.native.txt",
            b'Process 3: x\n\nThread 3 (idle): "MainThread"\n    c10d::Work::wait (libtorch.so)\n    f (x.py:3)\n'),
        ("rank_0.txt", b'Current thread 0x01 (most recent call first):\n  File "x.py", line 1 in f\n  File "x.py", line 2 in <module>\n'),
        ("rank_1.txt", b'Traceback for thread 1 (p) [Has the GIL] (most recent call last):\n    (Python) File "x.py", line 1, in f\n'),
        ("rank_2.txt", b'Thread 1 (Thread 0x7f (LWP 1) "p"):\n#0  0x0 in futex (a=1) from /lib/libc.so.6\n'),
        ("fr/rank_0.pickle", pickle.dumps(recorder, protocol=2)),
        ("nccl_trace_rank_1", pickle.dumps(recorder, protocol=4)),
        ("rank_1.json", json.dumps(recorder).encode()),
        ("ras/a.json", json.dumps({"communicators": [{"hash": "a", "ranks": [{"rank": 0,
            "collective_operation_counts": {"AllReduce": 1}}]}]}).encode()),
        ("ras/a.txt",
            b"NCCL version\nJob summary\nCommunicators\n#0-0 (ab) MISMATCH\n  1 rank has launched up to operation 5\n  Rank 2 -- x\n"),
        ("collection.json", json.dumps(contents).encode()),
        ("proc/0/rank_0.json", b'{"state": "S", "wchan": "futex_do_wait", "cpu_s": 1.0, "voluntary_switches": 3}'),
        ("env/rank_0.json", b'{"WORLD_SIZE": "2"}'),
        ("errors/rank_0.json", b'{"message": {"message": "boom", "extraInfo": {"timestamp": "1", "py_callstack": "x"}}}'),
        ("logs/rank_0.log", b"[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE)\nbye\n"),
        ("gpu/0/a.json", b'[{"index": 0, "utilization_percent": 100, "power_watts": 1.5}]'),
        ("source/rank_0.json", b'{"/v/site-packages/torch/x.py:3": "work.wait()"}'),
    ]  # fmt: skip


class Tags(HTMLParser):
    """Tags and attributes of a page, as a browser would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def check_reports(diagnosis, snapshot) -> None:
    terminal, html = str(report(diagnosis)), page(diagnosis, snapshot)
    assert not ESCAPES.search(terminal + html)
    seen = Tags()
    seen.feed(html)
    assert seen.tags <= {
        "html", "head", "meta", "title", "style", "body", "div", "h1", "h2", "p", "span", "table", "tr", "td",
        "code", "br", "b", "i", "ul", "li", "details", "summary", "pre",
        "a", "header", "main", "footer", "link", "section",
    }  # fmt: skip
    assert seen.attributes <= {
        "lang", "charset", "name", "content", "http-equiv", "class", "title", "id", "href", "rel", "tabindex",
        "role", "aria-label",
    }  # fmt: skip
    json.dumps(diagnosis.as_json())


@pytest.mark.parametrize("num_mutants", [200, pytest.param(5_000, marks=pytest.mark.long)])
def test_mutated_dumps_are_diagnosed_or_refused_and_never_more(tmp_path, monkeypatch, num_mutants):
    monkeypatch.chdir(tmp_path)
    chance, bases = random.Random(7), {f"{n} {name}": {name: data} for n, (name, data) in enumerate(seeds())}
    mutator, slowest = Mutator(bases, None), 0.0
    for number in range(num_mutants):
        reading = Reading()
        inputs = [mutator.input(chance) for _ in range(3)]
        files = [file for one in inputs for file in apply(bases[one.base], one.edits).files.items()]
        started = time.process_time()
        try:
            for name, data in files:
                take(reading, name, data)
            snapshot = finish(reading, None)
            diagnosis = diagnose(snapshot)
        except HangInputError:
            continue
        slowest = max(slowest, time.process_time() - started)
        if number % 20 == 0:
            check_reports(diagnosis, snapshot)
    assert list(tmp_path.iterdir()) == []
    assert slowest < 5


def test_poison_in_every_name_reaches_no_report(tmp_path):
    evil = '\x1b[31m<script>alert(1)</script>\u202e"\x07'
    text = f'Process 1: {evil}\n\nThread 1 (idle): "{evil}"\n    {evil} (torch/distributed/{evil}.py:3)\n    <module> (a.py:1)\n'
    for rank in range(2):
        (tmp_path / f"rank_{rank}.txt").write_text(text.replace("\x1b[31m", "\x1b[31m\x9b"))
    (tmp_path / f"rank_2{evil[:6].strip(chr(27))}.log").write_text(f"Error: {evil}\n")
    snapshot = read_snapshot([tmp_path])
    check_reports(diagnose(snapshot), snapshot)


def test_a_tar_that_promises_a_huge_member_is_passed_over(tmp_path):
    info = tarfile.TarInfo("rank_0.txt")
    info.size = 1 << 40
    (tmp_path / "huge.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 1024)
    notes: list[str] = []
    assert list(members_of(tmp_path / "huge.tar", notes)) == []
    assert "larger than" in notes[0]


def test_a_pickle_with_a_giant_memo_index_uses_no_memory():
    reading = Reading()
    take(reading, "fr/rank_0.pickle", b"\x80\x02}r\xff\xff\xff\xff.")
    assert reading.records == []
    assert "Flight Recorder" in reading.notes[0]


@pytest.mark.parametrize(
    ("name", "text", "note"),
    [
        ("samples/²/rank_0.txt", STACK, None),
        ("rank_0.txt", STACK.replace("Thread 1", "Thread ²"), None),
        ("env/rank_0.json", '{"WORLD_SIZE": "²"}', None),
        ("fr/rank_0.json", '{"version": "1", "entries": [{"profiling_name": "x", "state": "s", "seq_id": 1e999}]}',
            "Flight Recorder entry without cannot convert float infinity to integer"),
        ("ras/a.json", '{"communicators": [{"hash": "a", "ranks": [{"rank": 1e999}]}]}', "infinity"),
    ],
)  # fmt: skip
def test_digits_that_are_no_number_and_infinite_numbers_are_read(name, text, note):
    """`"²".isdigit()` holds, and `int("²")` fails."""
    reading = Reading()
    take(reading, "collection.json", b'{"format": "hangdoctor-collection", "version": 1}')
    take(reading, name, text.encode())
    diagnose(finish(reading, None))
    assert (note is None and reading.notes == []) or note in reading.notes[-1]
