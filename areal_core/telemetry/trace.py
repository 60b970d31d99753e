"""A trace of a run: what each rank did when, as one file that Perfetto and chrome://tracing open.

trainer thread         stages (through Stats.timing), pushes, counters  --+
rollout thread         episodes > generation, reward                    --+-> events in memory, under a lock
                                                                          |
after every `save_interval` steps, when there are many, and at the end: flush hands them to
writer thread          JSON -> rank-00000.jsonl, rank-00001.jsonl ...   a header with the rank's clock, then one event a line
the rank that ends last: merge -> trace.json (`trace_merge.py`); nobody waits for anybody

Overlapping work needs rows of its own to be drawn: an episode takes the lowest free lane, and what happens inside it (one
generation after the other, the reward) is drawn below it. Concurrent generations of one episode take further lanes.
Instrumented code holds a `Trace` or nothing; nothing here changes what it does.
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

logger = logging.getLogger(__name__)

TRAINER_LANE = 0
HEADER = "areal_trace_rank"  # the name of the line that starts a rank's file, and each continuation of it
FOOTER = "areal_trace_end"
MAX_BUFFERED = 5_000  # events; they wait for the end of a step unless there are so many


@dataclass
class Span:
    """Something that is going on: its lane, and the finished parts of it as (name, start, seconds)."""

    name: str
    category: str
    parent: "Span | None"
    shares_lane: bool  # with its parent
    lane: int
    start_ns: int
    args: dict[str, Any]
    part_is_open: bool = False
    phases: list[tuple[str, int, int]] = field(default_factory=list)  # name, start_ns, end_ns

    @property
    def root_name(self) -> str:
        return self.name if self.parent is None else self.parent.root_name


_CURRENT: ContextVar[Span | None] = ContextVar("trace_span", default=None)


class Trace:
    """The trace of one rank. Safe to use from several threads and tasks.

    Args:
        folder: where the ranks' files are.
        rank, world_size: of this process.
        options: what a reader needs to give advice, as JSON types; written into the header.
        continued: append to what an earlier start of the same run has written.
    """

    def __init__(
        self, folder: Path, rank: int, world_size: int, options: dict[str, Any], continued: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rank, self.world_size = folder, rank, world_size
        if continued:
            cut_half_line(rank_file(folder, rank))
        self._file: TextIO = rank_file(folder, rank).open("a" if continued else "w", encoding="utf-8")
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._free_lanes: list[int] = []
        self._num_lanes = 0
        self._num_running = 0
        self._origin_ns = time.perf_counter_ns()
        # A step of 1,000 episodes takes 50 ms to write down: neither the trainer nor the event loop should wait for it.
        self._to_write: queue.Queue[list[dict[str, Any]] | None] = queue.Queue()
        self._writer = threading.Thread(target=self._write, name="trace", daemon=True)
        self._writer.start()
        header = {"rank": rank, "world_size": world_size, "host": socket.gethostname(), "pid": os.getpid()}
        # The wall clock is read once: within a rank, time never runs backwards.
        header |= {"start_ns": time.time_ns(), **options}
        self._to_write.put([{"ph": "M", "name": HEADER, "args": header}])

    @contextmanager
    def span(self, name: str, category: str, parent: Span | None = None, **args: Any) -> Iterator[Span]:
        """Times what runs inside, as a part of `parent`: by default of the span that this task is in, if any."""
        span = self._open(name, category, parent or _CURRENT.get(), args)
        token = _CURRENT.set(span)
        try:
            yield span
        finally:
            _CURRENT.reset(token)
            self._close(span)

    @contextmanager
    def episode(self, prompt_id: int, sample_id: int) -> Iterator[Span]:
        """Times one episode and counts it as running; its `args` may be added to."""
        self._count_running(+1)
        try:
            name = f"episode {prompt_id}.{sample_id}"
            with self.span(name, "episode", None, prompt_id=prompt_id, sample_id=sample_id) as span:
                yield span
        finally:
            self._count_running(-1)

    def stage(self, name: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """A part of a training step, on the trainer's lane; `perf_counter_ns` times."""
        self.complete(name, "stage", start_ns, end_ns, TRAINER_LANE, args)

    def complete(
        self, name: str, category: str, start_ns: int, end_ns: int, lane: int, args: dict[str, Any]
    ) -> None:
        """Something that has begun and ended."""
        event = {"ph": "X", "name": name, "cat": category, "ts": self._us(start_ns)}
        self._add(event | {"dur": (end_ns - start_ns) / 1000, "tid": lane, "args": args})

    def counter(self, name: str, **values: float) -> None:
        """Values from now on, one curve each; those that are not finite, which JSON has no numbers for, are left out."""
        values = {curve: value for curve, value in values.items() if math.isfinite(value)}
        if not values:
            return
        event = {"ph": "C", "name": name, "cat": "counter", "tid": TRAINER_LANE, "args": values}
        self._add(event | {"ts": self._us(time.perf_counter_ns())})

    def instant(self, name: str, category: str, **args: Any) -> None:
        """Something without duration, across the whole rank."""
        event = {"ph": "i", "s": "p", "name": name, "cat": category, "tid": TRAINER_LANE, "args": args}
        self._add(event | {"ts": self._us(time.perf_counter_ns())})

    def flush(self) -> None:
        """Hands what is in memory to the writer; does not wait for the disk."""
        with self._lock:
            events, self._events = self._events, []
        self._to_write.put(events)

    def close(self) -> None:
        """Writes the rest, and says that this rank has ended. Call once."""
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
        except OSError as error:  # a full disk must not end a run that is only watched
            logger.warning("the trace %s ends here: %s", self._file.name, error)
            while self._to_write.get() is not None:
                continue

    def _open(self, name: str, category: str, parent: Span | None, args: dict[str, Any]) -> Span:
        """Begins a span: on its parent's lane, while no other part of the parent is drawn there."""
        with self._lock:
            shares_lane = parent is not None and not parent.part_is_open
            if shares_lane:
                parent.part_is_open = True
            lane = parent.lane if shares_lane else self._take_lane()
        if parent is not None:
            args["episode"] = parent.root_name
        return Span(name, category, parent, shares_lane, lane, time.perf_counter_ns(), args)

    def _close(self, span: Span) -> None:
        """Ends a span and writes it down."""
        end_ns = time.perf_counter_ns()
        with self._lock:
            if span.shares_lane:
                span.parent.part_is_open = False
            else:
                heapq.heappush(self._free_lanes, span.lane)
            if span.parent is not None:
                span.parent.phases.append((span.category, span.start_ns, end_ns))
        self.complete(span.name, span.category, span.start_ns, end_ns, span.lane, span.args)

    def _take_lane(self) -> int:
        if self._free_lanes:
            return heapq.heappop(self._free_lanes)
        self._num_lanes += 1
        return TRAINER_LANE + self._num_lanes

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
    """Where a rank writes its events."""
    return folder / f"rank-{rank:05d}.jsonl"


def cut_half_line(file: Path) -> None:
    """Removes the end of a file behind its last line, which a rank that was killed had begun to write."""
    if not file.exists():
        return
    with file.open("rb+") as events:
        content = events.read()
        events.truncate(content.rfind(b"\n") + 1)
