"""Measure the lag of an event loop, and sample its stack while it lags.

    loop's thread    beat  beat  beat .......(late)........ beat    each beat notes its own lateness
    watchdog thread               no beat for too long --> samples the stack until the next beat

A callback that is on the stack in consecutive samples has blocked the loop, and its stack shows
where. A loop that lags without one is busy: it has more short callbacks than time. A wait of the
thread for a core is lag, too, but no callback's: on Linux, samples do not count it.
"""

import asyncio
import itertools
import sys
import sysconfig
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

from areal_core.servers.health import percentile
from areal_debug.installation import EXAMPLES

BEAT_S = 0.01
SAMPLE_S = 0.02
NOT_USER_CODE = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parents[2]))
ASYNCIO = "/asyncio/"


@dataclass(frozen=True)
class Place:
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class StackSample:
    """The loop's stack at one moment; `callback` identifies the running callback, 0 if none."""

    beat_s: float  # time of the last beat, without waits for a core
    time_s: float  # without waits for a core
    callback: int
    stack: tuple[Place, ...]  # innermost last

    @property
    def late_s(self) -> float:
        """Time since the last beat."""
        return self.time_s - self.beat_s


@dataclass(frozen=True)
class Stall:
    """Callbacks that blocked the loop at one place."""

    place: str  # the innermost line of user code, else the innermost line
    count: int
    total_s: float
    longest_s: float
    stack: list[str]  # of the longest, innermost last, from the callback on


@dataclass(frozen=True)
class LoopReport:
    """The lag of one loop.

    Percentiles are over time: how long a request at a random moment would have waited.
    """

    name: str
    watched_s: float
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    late_s: float  # time in gaps between beats of more than half of `blocking_s`
    stalls: list[Stall] = field(default_factory=list)
    busiest: list[tuple[str, float]] = field(
        default_factory=list
    )  # places and their shares of the late samples

    def blocked(self) -> list[Stall]:
        """Return stalls beyond chance: one above a second, or a hundredth of the time in total.

        Other threads with the interpreter lock delay any callback by some tenths of a second.
        """
        return [s for s in self.stalls if s.longest_s > 1.0 or s.total_s > self.watched_s / 100]


class LoopMonitor:
    """Monitor an event loop of another thread, as a context manager; `report()` afterwards.

    Args:
        blocking_s: duration from which a callback counts as blocking.
    """

    def __init__(
        self, name: str, loop: asyncio.AbstractEventLoop, thread: threading.Thread, blocking_s: float = 0.1
    ) -> None:
        self.name, self.blocking_s = name, blocking_s
        self._loop, self._thread = loop, thread
        self._beats: list[float] = []
        self._last_beat_s = 0.0  # of `running_time`
        self._samples: list[StackSample] = []
        self._ended = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name=f"watch-{name}", daemon=True)

    def __enter__(self) -> "LoopMonitor":
        self._beats.append(time.monotonic())
        self._last_beat_s = running_time(self._thread)
        self._loop.call_soon_threadsafe(self._beat)
        self._watchdog.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beats.append(time.monotonic())
        self._ended.set()
        self._watchdog.join()

    def report(self) -> LoopReport:
        """Summarise what was measured."""
        gaps = [later - earlier for earlier, later in itertools.pairwise(self._beats)]
        lags = sorted(lags_over_time([gap - BEAT_S for gap in gaps]))
        late_s = sum(gap for gap in gaps if gap > self.blocking_s / 2)
        places = Counter(str(own_place(sample.stack)) for sample in self._samples if sample.stack)
        return LoopReport(
            name=self.name,
            watched_s=self._beats[-1] - self._beats[0],
            lag_p50_s=percentile(lags, 50),
            lag_p99_s=percentile(lags, 99),
            lag_max_s=lags[-1] if lags else 0.0,
            late_s=late_s,
            stalls=find_stalls(self._samples, self.blocking_s, late_s),
            busiest=[(place, count / places.total()) for place, count in places.most_common(3)],
        )

    def _beat(self) -> None:
        if not self._ended.is_set():
            self._beats.append(time.monotonic())
            self._last_beat_s = running_time(self._thread)
            self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            beat_s, now = self._last_beat_s, running_time(self._thread)
            if now - beat_s > self.blocking_s / 2:
                frame = sys._current_frames().get(self._thread.ident or 0)
                if frame is not None:
                    self._samples.append(StackSample(beat_s, now, *callback_and_stack(frame)))


def running_time(thread: threading.Thread) -> float:
    """Return the time in seconds, less those in which the thread was ready and had no core.

    Without the kernel's account of them (/proc/PID/task/TID/schedstat) they are taken as zero.
    """
    try:
        waited_ns = int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        waited_ns = 0
    return time.monotonic() - waited_ns / 1e9


def lags_over_time(lags: Sequence[float]) -> Iterator[float]:
    """Resample lags at regular moments: one of 1 s becomes a hundred values from 1 s down to 0.

    Otherwise a loop that is blocked for ten seconds would have one late beat among hundreds.
    """
    for lag in lags:
        yield max(lag, 0.0)
        yield from (lag - i * BEAT_S for i in range(1, int(lag / BEAT_S)))


def callback_and_stack(frame: FrameType) -> tuple[int, tuple[Place, ...]]:
    places: list[Place] = []
    inner: FrameType | None = None
    at: FrameType | None = frame
    while at is not None:
        code = at.f_code
        if code.co_name == "_run" and code.co_filename.endswith("asyncio/events.py"):
            return id(inner), tuple(reversed(places))
        places.append(Place(code.co_filename, at.f_lineno, code.co_qualname))
        inner, at = at, at.f_back
    return 0, ()


def find_stalls(samples: Sequence[StackSample], blocking_s: float, late_s: float) -> list[Stall]:
    """Find the places where callbacks blocked, the longest total time first.

    A stall is one long callback, or short ones at one place that sum to a fifth of the lag.
    """
    blocked: dict[Place, list[tuple[float, tuple[Place, ...]]]] = defaultdict(list)
    for seen in callbacks_in_consecutive_samples(samples):
        if all(ASYNCIO in place.file for place in seen[0].stack):
            continue  # the loop's own work, waiting for the interpreter lock or for a core
        # The first callback of a lag may have started with it; any other was sampled at most one
        # sampling interval after it started.
        is_first = seen[0].late_s < blocking_s / 2 + 2 * SAMPLE_S
        took_s = seen[-1].time_s - seen[0].time_s + (seen[0].late_s if is_first else SAMPLE_S)
        stack = Counter(sample.stack for sample in seen).most_common(1)[0][0]
        blocked[own_place(stack)].append((took_s, stack))
    stalls = [
        Stall(
            place=str(place),
            count=len(times),
            total_s=sum(took_s for took_s, _ in times),
            longest_s=max(took_s for took_s, _ in times),
            stack=[str(at) for at in max(times, key=lambda one: one[0])[1]],
        )
        for place, times in blocked.items()
    ]
    reported = [s for s in stalls if s.longest_s >= blocking_s or s.total_s >= max(late_s / 5, blocking_s)]
    return sorted(reported, key=lambda stall: stall.total_s, reverse=True)


def callbacks_in_consecutive_samples(samples: Sequence[StackSample]) -> Iterator[list[StackSample]]:
    seen: list[StackSample] = []
    for sample in samples:
        continues = seen and sample.callback == seen[-1].callback and sample.beat_s == seen[-1].beat_s
        if not continues:
            yield from [seen] if len(seen) > 1 else []
            seen = []
        if sample.callback:
            seen.append(sample)
    yield from [seen] if len(seen) > 1 else []


def own_place(stack: Sequence[Place]) -> Place:
    own = [place for place in stack if is_users(place.file)]
    return (own or stack)[-1]


def is_users(file: str) -> bool:
    """Return whether a file is user code: not Python's, not installed, not one of our packages."""
    return file.startswith(str(EXAMPLES)) or not file.startswith((*NOT_USER_CODE, "<"))
