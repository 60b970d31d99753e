"""Feed inputs to a worker and watch it: a hang is ended and named, a death belongs to its input."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .inputs import Input

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 45.0  # for an input that waits; one that computes is measured by its CPU time
START_S = 180.0
FAILED = ("traceback", "hang", "memory", "died")


@dataclass(frozen=True)
class Outcome:
    """What became of an input; `where` is the same for failures of the same place."""

    given: Input
    kind: str  # passed, refused, or one of FAILED
    where: str = ""
    error: str = ""
    size_bytes: int = 0
    cpu_s: float = 0.0


@dataclass
class Tally:
    """The outcomes of a target: counts, the worst, and the first failure of each place."""

    num_inputs: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    failures: dict[str, Outcome] = field(default_factory=dict)
    most_cpu_s: float = 0.0
    largest_bytes: int = 0

    def add(self, outcome: Outcome) -> None:
        self.num_inputs += 1
        self.kinds[outcome.kind] = self.kinds.get(outcome.kind, 0) + 1
        self.most_cpu_s = max(self.most_cpu_s, outcome.cpu_s)
        self.largest_bytes = max(self.largest_bytes, outcome.size_bytes)
        if outcome.kind in FAILED:
            self.failures.setdefault(f"{outcome.kind} {outcome.where}", outcome)


class Worker:
    """A process that runs inputs of one target at a time; started again after a hang or a death."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.process: subprocess.Popen[str] | None = None
        self.buffer = b""

    def start(self) -> None:
        self.stacks = Path(tempfile.mkstemp(prefix="fuzz-stack-")[1])
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        self.reports, write_end = os.pipe()
        command = [sys.executable, "-m", "tests.fuzz.worker", str(write_end), str(self.stacks)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            pass_fds=[write_end],
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        )
        os.close(write_end)
        self.buffer = b""
        self.select(self.target)

    def select(self, target: str) -> None:
        """Let the process, which is started if there is none, run inputs of a target."""
        self.target = target
        if self.process is None:
            self.start()
            return
        self.send({"target": target})
        ready = self.read(START_S)
        if ready is None:
            words = self.last_words()
            self.stop()
            raise RuntimeError(f"the worker of {self.target} did not start: {words}")
        self.bases: list[str] = ready["ready"]

    def send(self, request: dict[str, Any]) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def last_words(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-3000:]

    def stop(self) -> None:
        if self.process is not None:
            # its children, too; they are in its session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            os.close(self.reports)
            self.errors.close()
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.stacks.unlink(missing_ok=True)
            self.process = None

    def read(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next report; None at the end of the process or of the time."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.reports], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self.reports, 1 << 20) if ready else b""
            if not data:
                return None
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def run(self, request: dict[str, Any], on_outcome: Callable[[Outcome], None], end: float = 0.0) -> None:
        """Run a request; after a hang or a death the rest of it is dropped."""
        if self.process is None:
            self.start()
        self.send(request)
        while (report := self.read(LIMIT_S)) is not None and "done" not in report:
            given, started = Input(**report["start"]), time.monotonic()
            outcome = self.read(LIMIT_S)
            if outcome is None:
                on_outcome(self.broken(given, time.monotonic() - started))
                self.stop()
                return
            where, error, size = outcome["where"], outcome["error"], outcome["bytes"]
            on_outcome(Outcome(given, outcome["outcome"], where, error, size, outcome["cpu_s"]))
            if outcome["outcome"] == "memory" or (end and time.monotonic() > end):
                self.stop()  # the peak of its children is never lowered
                return
        if report is None:  # between two inputs: a defect of the target itself
            words = self.last_words()
            self.stop()
            raise RuntimeError(f"the worker of {self.target} ended: {words}")

    def broken(self, given: Input, seconds: float) -> Outcome:
        """Describe an input after which the worker answers no more."""
        assert self.process is not None
        if self.process.poll() is None and seconds >= LIMIT_S - 0.1:
            stack = self.stacks.read_text(errors="replace")
            frames = re.findall(
                rf'File "{re.escape(str(ROOT))}/((?!tests|\.venv)[^"]+)", line \d+ in (\w+)', stack
            )
            where = ":".join(frames[0]) if frames else "no frame"
            return Outcome(given, "hang", where, stack[:3000], 0, seconds)
        self.process.wait(timeout=LIMIT_S)
        return Outcome(given, "died", f"exit code {self.process.returncode}", self.last_words(), 0, seconds)


def check_valid(worker: Worker) -> None:
    """Run each base as it is: one that is refused would leave most of its reader untried."""
    for base in worker.bases:
        seen: list[Outcome] = []
        worker.run({"input": vars(Input(base, []))}, seen.append)
        if [one.kind for one in seen] != ["passed"]:
            raise RuntimeError(f"{worker.target}: the valid input {base!r} gives {seen}")


def run_inputs(
    target: str,
    inputs: list[Input],
    number: int = 0,
    seed: int = 0,
    seconds: float = 0.0,
    shared: Worker | None = None,
) -> Tally:
    """Run given inputs, then fresh ones: `number` of them, or as many as `seconds` allow.

    A worker that is `shared` with targets of the same imports goes on afterwards.
    """
    tally, worker = Tally(), shared or Worker(target)
    try:
        worker.select(target)
        check_valid(worker)
        end = time.monotonic() + seconds if seconds else 0.0
        for given in inputs:
            worker.run({"input": vars(given)}, tally.add)
        while time.monotonic() < end if seconds else tally.num_inputs < len(inputs) + number:
            left = 1_000_000 if seconds else len(inputs) + number - tally.num_inputs
            worker.run({"fresh": left, "seed": f"{seed} {tally.num_inputs}"}, tally.add, end)
    finally:
        if shared is None:
            worker.stop()
    return tally


def run_fresh(target: str, number: int, seed: int, seconds: float = 0.0) -> Tally:
    """Run fresh inputs: `number` of them, or as many as `seconds` allow."""
    return run_inputs(target, [], number, seed, seconds)


def minimised(target: str, outcome: Outcome, seconds: float = 60.0) -> Outcome:
    """Return the smallest input found that fails at the same place."""
    end, worker, best = time.monotonic() + seconds, Worker(target), outcome

    def fails(given: Input) -> bool:
        nonlocal best
        seen: list[Outcome] = []
        worker.run({"input": vars(given)}, seen.append)
        same = bool(seen) and (seen[0].kind, seen[0].where) == (outcome.kind, outcome.where)
        if same:
            best = seen[0]
        return same

    try:
        changed = True
        while changed and time.monotonic() < end:
            changed = any(fails(one) for one in smaller(best.given) if time.monotonic() < end)
    finally:
        worker.stop()
    return best


def smaller(given: Input) -> list[Input]:
    """Return smaller inputs, the smallest first: without an edit, with half of a text."""
    found = []
    for place in range(len(given.edits)):
        found.append(Input(given.base, given.edits[:place] + given.edits[place + 1 :]))
    for place, edit in enumerate(given.edits):
        if edit[0] in ("file", "text", "bytes") and isinstance(edit[-1], str) and len(edit[-1]) > 1:
            text = edit[-1]
            for size in sorted({max(1, len(text) >> shift) for shift in range(1, 12)}, reverse=True):
                for begin in range(0, len(text), size)[:40]:
                    less = [*edit[:-1], text[:begin] + text[begin + size :]]
                    found.append(Input(given.base, [*given.edits[:place], less, *given.edits[place + 1 :]]))
    return found
