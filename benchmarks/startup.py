"""Start-up times of verbs on a record of the tiny model, of this checkout and of another one.

    python -m benchmarks.startup [--before CHECKOUT] [--rounds 3] [--verbs replay goto ...]

Measures each call on a terminal from its start: wall seconds to its first line, to its first step
and to its end, and CPU seconds (user and system) of all its processes. Checkouts take turns; the
table has medians, and with --before the ratio of the CPU seconds. Where compiled Python files are
is left as the environment has it: run twice, the first run may compile.
"""

import math
import os
import pty
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from areal_core.testing import make_tiny_model
from benchmarks.harness import read_options

ROOT = Path(__file__).parents[1]
STEP = re.compile(r"^(\x1b\[[\d;]*[a-zA-Z])*step ", re.MULTILINE)
TEST = """
import pytest

@pytest.mark.parametrize("last", [0, 1, 2])
@pytest.mark.replay("{record}")
def test_it(replay_record, last):
    assert replay_record(steps=(0, last)).identical
"""


@dataclass(frozen=True)
class Call:
    """What one call took, in seconds; `first_step` is NaN for a call that prints no step."""

    first_line: float
    first_step: float
    wall: float
    cpu: float


def environment(checkout: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def cpu_seconds() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def measure(checkout: Path, command: Sequence[str], folder: Path) -> Call:
    """Run a command on a terminal; exit with its output if it fails."""
    before, start = cpu_seconds(), time.monotonic()
    terminal, output = pty.openpty()
    with subprocess.Popen(
        command,
        env=environment(checkout),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    ) as process:
        os.close(output)
        printed = [(time.monotonic() - start, text) for text in texts_of(terminal)]
    os.close(terminal)
    wall = time.monotonic() - start
    if process.returncode not in (0, 1):
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(t for _, t in printed)}")
    first_step = next((when for when, text in printed if STEP.search(text)), math.nan)
    return Call(printed[0][0] if printed else wall, first_step, wall, cpu_seconds() - before)


def texts_of(terminal: int) -> Iterator[str]:
    """Yield what is written to a terminal, as it is written, until all writers have closed it."""
    while True:
        try:
            text = os.read(terminal, 1 << 16)
        except OSError:  # EIO: the last writer has closed it
            return
        yield text.decode(errors="replace")


def prepare(folder: Path) -> dict[str, list[str]]:
    """Make a record of three steps and a test of it; return the arguments of Python by verb."""
    model, record = make_tiny_model(folder / "model"), folder / "record"
    config = ROOT / "tests/debug/tiny.yaml"
    options = ["--config", str(config), f"actor.path={model}", f"cluster.fileroot={folder / 'runs'}"]
    script = str(ROOT / "tests/debug/train_tiny.py")
    verb = ["-m", "areal_debug"]
    train = [sys.executable, *verb, "train", script, *options, "--dump-rollout", str(record)]
    measure(ROOT, train, folder)
    again = [*verb, "train", script, *options, "trial_name=again"]
    cut = ["--step", "1", "--to", str(folder / "cut.zip"), "--force"]
    (folder / "test_it.py").write_text(TEST.format(record=record))
    return {
        "replay": [*verb, "replay", str(record)],
        "goto": [*verb, "goto", str(record), "--step", "2"],
        "why": [*verb, "why", str(record)],
        "bisect-step": [*verb, "bisect-step", str(record), str(record)],
        "crosscheck": [*verb, "crosscheck", str(record)],
        "consistency": [*verb, "consistency", str(record)],
        "record cut": [*verb, "record", "cut", str(record), *cut],
        "train": again,
        "preflight": [*verb, "preflight", *options],
        "pytest, 3 tests": ["-m", "pytest", "-q", "-p", "areal_debug.pytest_plugin", "test_it.py"],
    }


def row(name: str, calls: list[Call], before: list[Call] | None) -> str:
    """Return a row of the table: medians, and the ratio of CPU seconds to another checkout."""
    times = zip(*((call.first_line, call.first_step, call.wall, call.cpu) for call in calls), strict=True)
    cells = ["-" if math.isnan(values[0]) else f"{median(values):.1f}" for values in times]
    cells.append(
        "" if before is None else f"{median(c.cpu for c in calls) / median(c.cpu for c in before):.2f}"
    )
    return " | ".join([f"| {name}", *cells]) + " |"


def main() -> None:
    options = read_options(__doc__, before="", rounds=3, verbs=[""])
    sides = {"now": ROOT}
    if options.before:
        sides["before"] = Path(options.before).resolve()
    found: dict[tuple[str, str], list[Call]] = {}
    with tempfile.TemporaryDirectory() as name:
        commands = prepare(Path(name))
        for _ in range(options.rounds):
            for verb in filter(None, options.verbs) or commands:
                for when, checkout in sides.items():
                    call = measure(checkout, [sys.executable, *commands[verb]], Path(name))
                    found.setdefault((verb, when), []).append(call)
    print("| verb | first line, s | first step, s | end, s | CPU s | of before |\n|---|---|---|---|---|---|")
    for (verb, when), calls in found.items():
        print(row(f"{verb}, {when}", calls, found.get((verb, "before")) if when != "before" else None))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
