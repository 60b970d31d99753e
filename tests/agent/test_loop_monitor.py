"""Blocked, busy and idle event loops, and the reports of the monitor."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_core.rollout.loop_thread import LoopThread
from areal_debug.agent.loop_monitor import LoopMonitor, Place, StackSample, find_stalls


@pytest.fixture
def loop():
    thread = LoopThread("watched")
    yield thread
    thread.close()


def watch(loop: LoopThread, coroutine):
    with LoopMonitor("watched", loop.loop, loop.thread) as monitor:
        loop.run(coroutine)
    return monitor.report()


async def block(seconds: float) -> None:
    time.sleep(seconds)


async def block_often(seconds: float, count: int) -> None:
    await asyncio.gather(*(block(seconds) for _ in range(count)))


def test_a_callback_that_blocks_is_named_with_its_stack(loop):
    report = watch(loop, block(0.4))
    (stall,) = report.stalls
    assert f"{__file__}:" in stall.place
    assert stall.place.endswith(" in block")
    assert stall.stack[-1] == stall.place
    assert 0.3 < stall.longest_s < 2
    assert report.lag_max_s > 0.3


def test_many_short_blocks_in_one_turn_of_the_loop_are_one_stall(loop):
    """No single callback is long, and yet the loop is blocked."""
    report = watch(loop, block_often(0.06, 15))
    (stall,) = report.stalls
    assert stall.place.endswith(" in block")
    assert stall.count > 5
    assert report.lag_p99_s > 0.3


async def compute(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waits")
def test_waits_for_a_core_are_no_callbacks(loop):
    """The callback computes for 0.3 s, and for five times as long waits for the only core."""
    core = min(os.sched_getaffinity(0))
    busy = f"import os, time\nos.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"
    others = [
        subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE, start_new_session=True)
        for _ in range(5)
    ]
    try:
        for other in others:
            other.stdout.readline()
        os.sched_setaffinity(loop.thread.native_id, [core])
        report = watch(loop, compute(0.3))
    finally:
        for other in others:
            other.kill()
            other.communicate()
    (stall,) = report.stalls
    assert report.lag_max_s > stall.longest_s + 0.3
    assert 0.2 < stall.longest_s < 0.8


def test_a_loop_that_waits_is_not_late(loop):
    report = watch(loop, asyncio.sleep(0.3))
    assert report.stalls == []
    assert report.lag_p50_s < 0.05


def sample(time_s: float, late_s: float, callback: int, line: int = 1) -> StackSample:
    return StackSample(round(time_s - late_s, 6), time_s, callback, (Place("agent.py", line, "run"),))


def test_different_callbacks_in_a_row_are_busyness_and_no_stall():
    busy = [sample(i * 0.02, 0.06 + i * 0.02, callback=i + 1, line=i) for i in range(50)]
    assert find_stalls(busy, 0.1, late_s=1.0) == []


def test_the_length_of_a_stall_counts_from_the_last_beat_of_the_loop():
    (stall,) = find_stalls(
        [sample(5.0, 0.07, 7), sample(5.02, 0.09, 7), sample(5.04, 0.11, 7)], 0.1, late_s=0.11
    )
    assert stall.longest_s == pytest.approx(0.11)
    assert (stall.place, stall.count) == ("agent.py:1 in run", 1)
