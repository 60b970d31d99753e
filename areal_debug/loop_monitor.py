"""How late an event loop runs, and what it was doing when it was late.

    loop's thread    beat  beat  beat ...........(late).............. beat     each beat notes its own lateness
    watchdog thread               looks: no beat for too long --> samples the loop thread's stack until the next beat

A callback that is on the stack in several samples running has blocked the loop, and its stack says where. A loop that is late without
one is busy: many short callbacks, more than it has time for.
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

BEAT_S = 0.01
LOOK_S = 0.02
NOT_THE_USERS = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parents[1]))
ASYNCIO = "/asyncio/"
EXAMPLES = str(Path(__file__).parents[1] / "examples")


@dataclass(frozen=True)
class Place:
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Sample:
    """The loop's stack at one moment; `callback` tells one callback from another, 0 between them."""

    time_s: float
    late_s: float  # since the last beat
    callback: int
    stack: tuple[Place, ...]  # innermost last


@dataclass(frozen=True)
class Stall:
    """Callbacks that blocked the loop at one place."""

    place: str  # the innermost line of the user's own code, else the innermost of all
    count: int
    total_s: float
    longest_s: float
    stack: list[str]  # of the longest, innermost last, from the callback on


@dataclass(frozen=True)
class LoopReport:
    """How late a loop ran. Percentiles are over time: what something that asks at a random moment would have waited."""

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
        """The stalls that are no chance: longer than a second, or a hundredth of all time in sum.

        A machine with more to do than cores holds any callback up for some tenths of a second.
        """
        return [s for s in self.stalls if s.longest_s > 1.0 or s.total_s > self.watched_s / 100]


class LoopMonitor:
    """Watches one event loop, which runs in another thread, as a context manager; `report()` afterwards.

    Args:
        blocking_s: a callback that takes longer has blocked the loop.
    """

    def __init__(
        self, name: str, loop: asyncio.AbstractEventLoop, thread: threading.Thread, blocking_s: float = 0.1
    ) -> None:
        self.name, self.blocking_s = name, blocking_s
        self._loop, self._thread = loop, thread
        self._beats: list[float] = []
        self._samples: list[Sample] = []
        self._ended = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name=f"watch-{name}", daemon=True)

    def __enter__(self) -> "LoopMonitor":
        self._beats.append(time.monotonic())
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
        """What was seen while it watched."""
        gaps = [later - earlier for earlier, later in itertools.pairwise(self._beats)]
        lags = sorted(lags_over_time([gap - BEAT_S for gap in gaps]))
        late_s = sum(gap for gap in gaps if gap > self.blocking_s / 2)
        places = Counter(str(own_place(sample.stack)) for sample in self._samples if sample.stack)
        return LoopReport(
            name=self.name,
            watched_s=self._beats[-1] - self._beats[0],
            lag_p50_s=percentile(lags, 0.5),
            lag_p99_s=percentile(lags, 0.99),
            lag_max_s=lags[-1] if lags else 0.0,
            late_s=late_s,
            stalls=find_stalls(self._samples, self.blocking_s, late_s),
            busiest=[(place, count / places.total()) for place, count in places.most_common(3)],
        )

    def _beat(self) -> None:
        if not self._ended.is_set():
            self._beats.append(time.monotonic())
            self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            now = time.monotonic()
            late_s = now - self._beats[-1]
            if late_s > self.blocking_s / 2:
                frame = sys._current_frames().get(self._thread.ident or 0)
                if frame is not None:
                    self._samples.append(Sample(now, late_s, *callback_and_stack(frame)))


def lags_over_time(lags: Sequence[float]) -> Iterator[float]:
    """Lags at regular moments: one of a second stands for a hundred moments, of which the last one waits no more.

    Without it a loop that stands still for ten seconds has one bad beat among hundreds.
    """
    for lag in lags:
        yield max(lag, 0.0)
        yield from (lag - i * BEAT_S for i in range(1, int(lag / BEAT_S)))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of the ordered values do not exceed; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def callback_and_stack(frame: FrameType) -> tuple[int, tuple[Place, ...]]:
    """Identity of the callback that the loop runs, and the stack from it on; 0 and nothing between callbacks."""
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


def find_stalls(samples: Sequence[Sample], blocking_s: float, late_s: float) -> list[Stall]:
    """The places where callbacks blocked, the costliest first.

    One long callback is a stall, and so are short ones at one place that make up a fifth of the time that the loop was late.
    """
    blocked: dict[Place, list[tuple[float, tuple[Place, ...]]]] = defaultdict(list)
    for seen in callbacks_sampled_twice(samples):
        if all(ASYNCIO in place.file for place in seen[0].stack):
            continue  # the loop's own work, which waits for the interpreter or for a core
        # The first of a late time may have begun with it; any other was seen at most one look after it began.
        is_first = seen[0].late_s < blocking_s / 2 + 2 * LOOK_S
        took_s = seen[-1].time_s - seen[0].time_s + (seen[0].late_s if is_first else LOOK_S)
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
    told = [s for s in stalls if s.longest_s >= blocking_s or s.total_s >= max(late_s / 5, blocking_s)]
    return sorted(told, key=lambda stall: stall.total_s, reverse=True)


def callbacks_sampled_twice(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """The samples of each callback that more than one look in a row has found."""
    seen: list[Sample] = []
    for sample in samples:
        # Since the last beat less time has passed than at the look before: there was a beat between them.
        goes_on = seen and sample.callback == seen[-1].callback and sample.late_s > seen[-1].late_s
        if not goes_on:
            yield from [seen] if len(seen) > 1 else []
            seen = []
        if sample.callback:
            seen.append(sample)
    yield from [seen] if len(seen) > 1 else []


def own_place(stack: Sequence[Place]) -> Place:
    """The innermost place in the user's own code, neither a library nor ours; else the innermost of all."""
    own = [place for place in stack if is_users(place.file)]
    return (own or stack)[-1]


def is_users(file: str) -> bool:
    """Whether a file is neither of Python, nor installed, nor one of our packages."""
    return file.startswith(EXAMPLES) or not file.startswith((*NOT_THE_USERS, "<"))
