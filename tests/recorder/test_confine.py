"""The child that reads untrusted input: what it tries is refused by this kernel, or ends it."""

import ctypes
import math
import mmap
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from recorder import confine
from recorder.confine import GIB, Bounds, LimitReached, bounds_for, run_confined
from recorder.landlock import LANDLOCK_CREATE

LANDLOCK = ctypes.CDLL(None).syscall(LANDLOCK_CREATE, None, 0, 1)
needs_landlock = pytest.mark.skipif(LANDLOCK < 1, reason="this kernel has no Landlock")
BOUNDS = Bounds("the input", (), memory_bytes=GIB, cpu_s=5, wall_s=20)


def refused(attempt):
    """Return the name of the error that an attempt in the child ends with, or what it returned."""

    def attempted():
        try:
            return ["returned", repr(attempt())]
        except Exception as error:
            return [type(error).__name__, str(error)]

    return run_confined(attempted, BOUNDS)[0]


def test_a_value_an_error_and_an_exit_code_come_back(tmp_path):
    class Special(ValueError):
        def __init__(self, one, two):
            super().__init__(f"{one}, {two}")

    def fail(error):
        raise error

    assert run_confined(lambda: {"a": [1, 2.5, None, "ü"]}, BOUNDS) == {"a": [1, 2.5, None, "ü"]}
    with pytest.raises(ValueError, match=r"^bad$"):
        run_confined(lambda: fail(UnicodeError("bad")), BOUNDS)
    with pytest.raises(Special, match=r"^1, 2$"):
        run_confined(lambda: fail(Special(1, 2)), BOUNDS, errors=(Special,))
    with pytest.raises(FileNotFoundError, match="absent"):
        run_confined((tmp_path / "absent").read_text, replace(BOUNDS, reads=(tmp_path,)))
    with pytest.raises(SystemExit) as ended:
        run_confined(lambda: sys.exit(7), BOUNDS)
    assert ended.value.code == 7


@pytest.mark.skipif(LANDLOCK < 4, reason="this kernel's Landlock has no rights of TCP")
def test_no_tcp():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert refused(lambda: socket.create_connection(("127.0.0.1", port), timeout=3)) == "PermissionError"
        assert refused(lambda: socket.create_server(("127.0.0.1", 0))) == "PermissionError"
    assert refused(lambda: socket.socketpair()[0].fileno() > 0) == "returned"  # what asyncio needs


@needs_landlock
def test_no_program():
    assert refused(lambda: subprocess.run(["/bin/true"])) == "PermissionError"
    assert refused(lambda: os.execv("/bin/true", ["true"])) == "PermissionError"


@needs_landlock
def test_files_elsewhere_cannot_be_read_written_or_removed(tmp_path):
    for name in ("input", "scratch", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    bounds = replace(BOUNDS, reads=(tmp_path / "input",), writes=(tmp_path / "scratch",))

    def tried(attempt):
        try:
            return str(attempt())
        except OSError as error:
            return type(error).__name__

    def attempts():
        other = tmp_path / "elsewhere"
        return [
            tried((tmp_path / "input" / "file").read_text),
            tried(lambda: (tmp_path / "input" / "file").write_text("x")),
            tried(lambda: (tmp_path / "scratch" / "new").write_text("x")),
            tried(lambda: (tmp_path / "scratch" / "new").rename(tmp_path / "scratch" / "newer").name),
            tried((other / "file").read_text),
            tried(lambda: (other / "new").write_text("x")),
            tried((other / "file").unlink),
            tried(lambda: os.truncate(other / "file", 0)),
            tried(lambda: (tmp_path / "scratch" / "newer").rename(other / "newer")),
            tried(lambda: os.link(other / "file", tmp_path / "scratch" / "link")),
            tried(lambda: Path("/etc/shadow").read_text()),
        ]

    no, crossing = "PermissionError", "OSError"  # EXDEV
    found = run_confined(attempts, bounds)
    assert found[:8] == ["input", no, "1", "newer", no, no, no, no]
    assert found[8:] == [crossing if LANDLOCK == 1 else no, crossing, no]
    assert (tmp_path / "elsewhere" / "file").read_text() == "elsewhere"


def test_memory_is_limited():
    bounds = replace(BOUNDS, memory_bytes=GIB // 4)
    for allocate in (lambda: bytearray(10 * GIB), lambda: len(list(range(10**9)))):
        with pytest.raises(LimitReached, match=r"more than 0\.25 GiB of memory.*AREAL_DEBUG_MEMORY_GIB"):
            run_confined(allocate, bounds)

    def share():
        memory = mmap.mmap(-1, GIB // 2)  # shared pages do not count for the kernel's limit
        for at in range(0, len(memory), 4096):
            memory[at] = 1
        time.sleep(5)

    with pytest.raises(LimitReached, match=r"more than 0\.25 GiB of memory"):
        run_confined(share, bounds)


def test_time_is_limited():
    def spin():
        while True:
            pass

    started_at = time.monotonic()
    with pytest.raises(LimitReached, match=r"more than 0\.5 s of CPU time.*AREAL_DEBUG_TIME_S"):
        run_confined(spin, replace(BOUNDS, cpu_s=0.5))
    with pytest.raises(LimitReached, match=r"more than 0\.5 s of waiting, .*AREAL_DEBUG_TIME_S"):
        run_confined(lambda: time.sleep(60), replace(BOUNDS, wall_s=0.5))
    assert time.monotonic() - started_at < 40


def test_a_lower_limit_of_the_shell_is_named(monkeypatch):
    monkeypatch.setattr(confine, "cpu_allowed_s", lambda: math.floor(time.process_time()) + 2)
    with pytest.raises(
        LimitReached, match=r"more than [01].* s of CPU time.*; set `ulimit -t` to allow more"
    ):
        run_confined(lambda: sum(range(10**9)), BOUNDS)


def test_a_crash_is_one_sentence(capfd):
    with pytest.raises(
        LimitReached, match="the process that reads the input ended with SIGSEGV: the input is damaged"
    ):
        run_confined(lambda: ctypes.string_at(0), BOUNDS)
    with pytest.raises(LimitReached, match="ended with code 9"):
        run_confined(lambda: os._exit(9), BOUNDS)


def test_a_child_that_was_taken_over_sends_data_only():
    def lie():
        pipe = sys._getframe(1).f_locals["writing"]  # that of the result
        os.write(pipe, b"[" * 100_000 + b"\n{}")
        os._exit(0)

    with pytest.raises(LimitReached, match="ended with code 0"):
        run_confined(lie, BOUNDS)


def test_the_child_does_not_outlive_its_parent(tmp_path):
    program = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from recorder.confine import Bounds, run_confined
run_confined(lambda: (print(os.getpid(), flush=True), time.sleep(60)), Bounds("x", ()))
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    ends_at = time.monotonic() + 20
    while (
        time.monotonic() < ends_at
        and os.path.exists(f"/proc/{child}")
        and "zombie" not in Path(f"/proc/{child}/status").read_text()
    ):
        time.sleep(0.05)
    assert time.monotonic() < ends_at


def test_limits_follow_from_the_size_of_the_input(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(1_000_000))
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 10**12)
    os.symlink("/", tmp_path / "link")
    bounds = bounds_for([tmp_path])
    assert (bounds.memory_bytes - GIB) / 20 == pytest.approx(1_000_000, rel=0.05)
    assert bounds.cpu_s == pytest.approx(11, rel=0.01)
    assert not bounds.network
    monkeypatch.setenv("AREAL_DEBUG_MEMORY_GIB", "2")
    monkeypatch.setenv("AREAL_DEBUG_TIME_S", "3")
    assert bounds_for([tmp_path]).memory_bytes == 2 * GIB
    assert bounds_for([tmp_path]).cpu_s == 3
    monkeypatch.setenv("AREAL_DEBUG_TIME_S", "soon")
    with pytest.raises(ValueError, match="AREAL_DEBUG_TIME_S is 'soon'"):
        bounds_for([tmp_path])
    monkeypatch.delenv("AREAL_DEBUG_TIME_S")
    for name in ("a:", "s3:", "a:b", "s3:/x"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path)
        for path in (name, f"{name}/", tmp_path / name, f"./{name}/x"):
            assert not bounds_for([path]).network, path
    assert bounds_for(["s3://bucket/a"]).network
    assert bounds_for(["s3:/bucket/a"]).network
