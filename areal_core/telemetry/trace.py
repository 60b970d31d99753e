"""A trace of a run: the timeline of each rank, in one file for Perfetto and chrome://tracing.

trainer thread         stages (Stats.timing), weight updates, counters  --+
rollout thread         episodes > generation, reward                    --+-> events in memory, under a lock
                                                                          |
after every `save_interval` steps, when there are many, and at the end: flush passes them to
writer thread          JSON -> rank-00000.jsonl, rank-00001.jsonl ...   a header with the rank's clock, then one event per line
the rank that ends last: merge -> trace.json (`trace_merge.py`); no rank waits for another

Overlapping work needs separate tracks: an episode takes the lowest free track, and its sequential
work (generations, the reward) is drawn on the same one. Concurrent generations of one episode take
further tracks. Instrumented code has a `Trace` or none; tracing does not change its behaviour.
"""

import heapq
import json
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from areal_core.safety.durable import remove_partial_line

logger = logging.getLogger(__name__)

TRAINER_TRACK = 0
HEADER = "areal_trace_rank"  # name of the first line of a rank's file and of each continuation
FOOTER = "areal_trace_end"
MAX_BUFFERED = 5_000  # events; written at the end of a step, or when there are so many


@dataclass
class Span:
    """A running activity: its track, and the phases of it that have finished."""

    name: str
    category: str
    parent: "Span | None"
    shares_track: bool  # with its parent
    track: int
    start_ns: int
    args: dict[str, Any]
    has_open_child: bool = False
    phases: list[tuple[str, int, int]] = field(default_factory=list)  # name, start_ns, end_ns

    @property
    def root_name(self) -> str:
        return self.name if self.parent is None else self.parent.root_name


_CURRENT: ContextVar[Span | None] = ContextVar("trace_span", default=None)
_TRACE: ContextVar["Trace | None"] = ContextVar("trace", default=None)


def current_trace() -> "Trace | None":
    """Return the trace of the episode that this task runs for; None without one."""
    return _TRACE.get()


class Trace:
    """The trace of one rank. Safe to use from several threads and tasks.

    Args:
        folder: folder of the ranks' files.
        rank, world_size: of this process.
        options: options of the run for readers, as JSON types; written into the header.
        continued: append to the file of an earlier start of the same run.
    """

    def __init__(
        self, folder: Path, rank: int, world_size: int, options: dict[str, Any], continued: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rank, self.world_size = folder, rank, world_size
        if continued:
            remove_partial_line(rank_file(folder, rank))
        self._file: TextIO = rank_file(folder, rank).open("a" if continued else "w", encoding="utf-8")
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._free_tracks: list[int] = []
        self._num_tracks = 0
        self._num_running = 0
        self._origin_ns = time.perf_counter_ns()
        # The events of 1,000 episodes take 50 ms to write; neither the trainer nor the event loop
        # should wait for that.
        self._to_write: queue.Queue[list[dict[str, Any]] | None] = queue.Queue()
        self._writer = threading.Thread(target=self._write, name="trace", daemon=True)
        self._writer.start()
        header = {"rank": rank, "world_size": world_size, "host": socket.gethostname(), "pid": os.getpid()}
        # The wall clock is read once: within a rank, time is monotonic.
        header |= {"start_ns": time.time_ns(), **options}
        self._to_write.put([{"ph": "M", "name": HEADER, "args": header}])

    @contextmanager
    def span(self, name: str, category: str, parent: Span | None = None, **args: Any) -> Iterator[Span]:
        """Time the body, as a child of `parent`, by default of the current span of this task."""
        span = self._open(name, category, parent or _CURRENT.get(), args)
        token = _CURRENT.set(span)
        try:
            yield span
        finally:
            _CURRENT.reset(token)
            self._close(span)

    @contextmanager
    def episode(self, prompt_id: int, sample_id: int) -> Iterator[Span]:
        """Time one episode and count it as running; the body may add to its `args`."""
        self._count_running(+1)
        token = _TRACE.set(self)
        try:
            name = f"episode {prompt_id}.{sample_id}"
            with self.span(name, "episode", None, prompt_id=prompt_id, sample_id=sample_id) as span:
                yield span
        finally:
            _TRACE.reset(token)
            self._count_running(-1)

    def stage(self, name: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Record a stage of a training step, on the trainer's track; `perf_counter_ns` times."""
        self.complete(name, "stage", start_ns, end_ns, TRAINER_TRACK, args)

    def complete(
        self, name: str, category: str, start_ns: int, end_ns: int, track: int, args: dict[str, Any]
    ) -> None:
        """Record a finished activity."""
        event = {"ph": "X", "name": name, "cat": category, "ts": self._us(start_ns)}
        self._add(event | {"dur": (end_ns - start_ns) / 1000, "tid": track, "args": args})

    def counter(self, name: str, **values: float) -> None:
        """Record values that hold from now on, one curve each; non-finite ones are left out."""
        values = {curve: value for curve, value in values.items() if math.isfinite(value)}
        if not values:
            return
        event = {"ph": "C", "name": name, "cat": "counter", "tid": TRAINER_TRACK, "args": values}
        self._add(event | {"ts": self._us(time.perf_counter_ns())})

    def instant(self, name: str, category: str, **args: Any) -> None:
        """Record an event without duration, of the complete rank."""
        event = {"ph": "i", "s": "p", "name": name, "cat": category, "tid": TRAINER_TRACK, "args": args}
        self._add(event | {"ts": self._us(time.perf_counter_ns())})

    def flush(self) -> None:
        """Pass buffered events to the writer; does not wait for the disk."""
        with self._lock:
            events, self._events = self._events, []
        self._to_write.put(events)

    def close(self) -> None:
        """Write the remaining events, and mark this rank as ended. Call once."""
        self.flush()
        self._to_write.put([{"ph": "M", "name": FOOTER, "args": {}}])
        self._to_write.put(None)
        self._writer.join()

    def _write(self) -> None:
        try:
            with self._file:
                while (events := self._to_write.get()) is not None:
                    lines = (json.dumps(event, separators=(",", ":")) + "\n" for event in events)
                    self._file.write("".join(lines))
                    self._file.flush()
                    self._to_write.task_done()
        except OSError as error:  # a full disk must not end a run because of its trace
            logger.warning("the trace %s ends here: %s", self._file.name, error)
            while self._to_write.get() is not None:
                continue

    def _open(self, name: str, category: str, parent: Span | None, args: dict[str, Any]) -> Span:
        """Start a span: on its parent's track, unless another child of it is drawn there."""
        with self._lock:
            if parent is not None and not parent.has_open_child:
                parent.has_open_child = True
                shares_track, track = True, parent.track
            else:
                shares_track, track = False, self._take_track()
        if parent is not None:
            args["episode"] = parent.root_name
        return Span(name, category, parent, shares_track, track, time.perf_counter_ns(), args)

    def _close(self, span: Span) -> None:
        end_ns = time.perf_counter_ns()
        with self._lock:
            if span.parent is not None and span.shares_track:
                span.parent.has_open_child = False
            else:
                heapq.heappush(self._free_tracks, span.track)
            if span.parent is not None:
                span.parent.phases.append((span.category, span.start_ns, end_ns))
        self.complete(span.name, span.category, span.start_ns, end_ns, span.track, span.args)

    def _take_track(self) -> int:
        if self._free_tracks:
            return heapq.heappop(self._free_tracks)
        self._num_tracks += 1
        return TRAINER_TRACK + self._num_tracks

    def _count_running(self, change: int) -> None:
        with self._lock:
            self._num_running += change
            running = self._num_running
        self.counter("episodes running", episodes=running)

    def _us(self, at_ns: int) -> float:
        return (at_ns - self._origin_ns) / 1000

    def _add(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._events.append(event)
            full = len(self._events) >= MAX_BUFFERED
        if full:
            self.flush()


def rank_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's events."""
    return folder / f"rank-{rank:05d}.jsonl"
