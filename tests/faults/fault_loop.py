"""Run operations while their n-th call that changes the disk fails, for n = 1, 2, ...; print JSON.

fault_loop.py FOLDER [--most N] [--only PATTERN]

Each trial is a forked process in a copy of the folder that the operation starts from. After each
fault: the error is one sentence, what was complete is intact, nothing incomplete has a final name,
and the operation succeeds when it is repeated.
"""

import argparse
import errno
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import disk

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, disk.KILL)
MODES = [(error, False) for error in ERRORS] + [(errno.ENOSPC, True), (errno.EROFS, True)]
LIMIT_S = 60
DEFECT = 70  # exit code of a trial that ends with a traceback


@dataclass
class Result:
    """Faults that were injected into one operation, and what went wrong, one sentence each."""

    name: str
    calls: int = 0
    faults: int = 0
    losses: list[str] = field(default_factory=list)


def in_child(work: Callable[[], object], output: Path) -> int:
    """Run `work` in a forked process, with redirected output; return its exit code, or -signal."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os._exit(run_in_child(work, output))
    end = time.monotonic() + LIMIT_S
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 124
        time.sleep(0.002)


def run_in_child(work: Callable[[], object], output: Path) -> int:
    with redirected(output):
        return end_of(work)


@contextmanager
def redirected(folder: Path) -> Iterator[None]:
    """Write standard output and error, of native code too, into `out` and `err` in a folder."""
    kept = []
    for number, name in ((1, "out"), (2, "err")):
        kept.append(os.dup(number))
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


def end_of(work: Callable[[], object]) -> int:
    """Run `work`; return the exit code of a program that does it, and print its error."""
    try:
        work()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except BaseException:
        traceback.print_exc()
        return DEFECT
    return 0


class Loop:
    def __init__(self, operation, root: Path, control: disk.Control) -> None:
        self.operation, self.control = operation, control
        self.start, self.trial = root / "start", root / "trial"
        self.output, self.judged = root / "output", root / "judged"
        self.output.mkdir(parents=True)
        self.judged.mkdir()
        self.start.mkdir()
        self.result = Result(operation.name)
        # made at the trial's path, which may be stored in what is made
        self.trial.mkdir()
        self.must(lambda: operation.before(self.trial), "before")
        self.trial.rename(self.start / "trial")
        self.reset()
        control.arm(self.trial, 0)
        self.must(lambda: operation.run(self.trial), "the reference")
        control.disarm()
        committed = self.lines("out")
        self.result.calls = control.calls
        self.must(lambda: operation.check(self.trial, committed), "check of the reference")
        self.names = self.names_now()
        self.new = self.contents()
        self.reset()
        self.old, self.old_names = self.contents(), self.names_now()

    def must(self, work: Callable[[], object], what: str) -> None:
        code = in_child(work, self.output)
        if code:
            raise RuntimeError(f"{self.operation.name}: {what} ended with {code}: {self.text('err')}")

    def reset(self) -> None:
        shutil.rmtree(self.trial, ignore_errors=True)
        shutil.copytree(self.start / "trial", self.trial, symlinks=True)

    def text(self, name: str) -> str:
        return (self.output / name).read_text(errors="replace")

    def lines(self, name: str) -> list[str]:
        return self.text(name).splitlines()

    def contents(self) -> dict[str, bytes | None]:
        return {
            name: (self.trial / name).read_bytes() if (self.trial / name).exists() else None
            for name in self.operation.files
        }

    def names_now(self) -> set[str]:
        return {str(path.relative_to(self.trial)) for path in self.trial.rglob("*")}

    def inject(self, at: int, error: int, stays: bool) -> bool:
        """Run one trial; return whether the fault was reached."""
        self.reset()
        self.control.arm(self.trial, at, error, stays)
        if error == disk.KILL:
            code = in_child(lambda: self.operation.run(self.trial), self.output)
            self.control.disarm()
            end = in_child(lambda: self.judge(code, error, stays), self.judged)
        else:
            end = in_child(lambda: self.run_and_judge(error, stays), self.judged)
            self.control.disarm()
        if not self.control.fired:
            return False
        self.result.faults += 1
        what = self.control.what.decode(errors="replace").replace(str(self.trial), "")
        which = f"{disk.name_of(error)}{', which stays' if stays else ''} at {at}, {what}"
        problems = (self.judged / "out").read_text(errors="replace").splitlines()
        if end:
            last = (self.judged / "err").read_text(errors="replace").strip().splitlines()[-1:]
            problems.append(f"does not end within {LIMIT_S} s" if end == 124 else f"exit code {end}: {last}")
        self.result.losses += [f"{which}: {problem}" for problem in problems]
        return True

    def run_and_judge(self, error: int, stays: bool) -> None:
        with redirected(self.output):
            code = end_of(lambda: self.operation.run(self.trial))
        self.control.disarm()
        if self.control.fired:
            self.judge(code, error, stays)

    def judge(self, code: int, error: int, stays: bool) -> None:
        """Print what is wrong after the fault, and when the operation is repeated."""
        committed = self.lines("out")
        for problem in self.problems(code, error, stays):
            print(problem)
        self.check(committed, "after the fault")
        with redirected(self.output):
            code = end_of(lambda: self.operation.run(self.trial))
        if code:
            print(f"repeated: {self.lines('err')[-1:]}")
            return
        self.check(self.lines("out"), "after the repetition")
        if self.contents() != self.new:
            print("the repetition wrote other bytes")
        if left := sorted(self.names_now() - self.names - self.old_names):
            print(f"the repetition left {left}")

    def check(self, committed: list[str], when: str) -> None:
        with redirected(self.output):
            code = end_of(lambda: self.operation.check(self.trial, committed))
        if code:
            print(f"{when}: {self.lines('err')[-1:]}")

    def problems(self, code: int, error: int, stays: bool) -> list[str]:
        """Return what is wrong with the end of the operation and the files that it left."""
        found = []
        if error == disk.KILL:
            # 2: it was a child that was killed, and the verb says so
            if code not in (-signal.SIGKILL, 0, 2) or "Traceback" in self.text("err"):
                found.append(f"exit code {code} of a killed process")
        else:
            found += self.problems_of_sentence(code, error)
            left = self.names_now() - self.names - self.old_names
            allowed = re.compile(self.operation.unfinished)
            cannot_remove = stays and error != errno.ENOSPC
            if (left := sorted(n for n in left if not allowed.fullmatch(n))) and not cannot_remove:
                found.append(f"left {left}")
        for name, content in self.contents().items():
            if content not in (self.old[name], self.new[name]):
                size = None if content is None else len(content)
                found.append(f"{name} has {size} bytes, neither the old nor the new ones")
        return found

    def problems_of_sentence(self, code: int, error: int) -> list[str]:
        printed = self.text("err")
        if code == 124:
            return [f"does not end within {LIMIT_S} s"]
        if code == 0:
            if "Traceback" in printed:
                return [f"a traceback: {printed.strip().splitlines()[-1]}"]
            return []
        if "Traceback" in printed or code == DEFECT:
            return [f"a traceback: {printed.strip().splitlines()[-1]}"]
        sentences = [line for line in printed.splitlines() if line.startswith("Error: ")]
        if code != 2 or len(sentences) != 1:
            return [f"exit code {code}, {printed.strip()[-300:]!r}"]
        if os.strerror(error).lower() not in sentences[0].lower():
            return [f"the sentence lacks the reason: {sentences[0]!r}"]
        return []


def run_loop(loop: Loop, most: int, offset: int) -> Result:
    """Inject every fault until a call is not reached, or about `most`, spread evenly."""
    every = max(1, loop.result.calls * len(MODES) // most) if most else 1
    # in the middle of `every`: the last call of a fault-free run is not reached in every run
    number, at, reached = every // 4 + offset % max(1, every // 2), 0, True
    while reached:
        at += 1
        reached = bool(most) and at < loop.result.calls
        for error, stays in MODES:
            number += 1
            if number % every == 0:
                reached = loop.inject(at, error, stays) or reached
    return loop.result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, default=0, help="faults an operation; 0 for all")
    parser.add_argument("--only", default="", help="regular expression of operations")
    options = parser.parse_args()
    control = disk.open_control(Path(os.environ[disk.CONTROL]))
    from operations import OPERATIONS

    for number, operation in enumerate(OPERATIONS):
        if re.search(options.only, operation.name):
            started, root = time.monotonic(), options.folder / str(number)
            try:
                result = run_loop(Loop(operation, root, control), options.most, number)
            except RuntimeError as error:
                result = Result(operation.name, losses=[str(error)])
            shutil.rmtree(root, ignore_errors=True)
            print(json.dumps(asdict(result) | {"seconds": time.monotonic() - started}), flush=True)


if __name__ == "__main__":
    main()
