"""Start-up times of verbs on a record of the tiny model, of this checkout and of another one.

    python benchmarks/startup.py [--before CHECKOUT] [--rounds 3] [--verbs replay goto ...]

Measures each call from its start: wall seconds to its first line and to its end, and CPU seconds
(user and system) of all its processes. Checkouts take turns; the table has medians. Where compiled
Python files are is left as the environment has it: run twice, the first run may compile.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from areal_core.testing import make_tiny_model

ROOT = Path(__file__).parents[1]
TEST = """
import pytest

@pytest.mark.parametrize("last", [0, 1, 2])
@pytest.mark.replay("{record}")
def test_it(replay_record, last):
    assert replay_record(steps=(0, last)).identical
"""


@dataclass(frozen=True)
class Call:
    """What one call took, in seconds."""

    first_line: float
    wall: float
    cpu: float


def environment(checkout: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def measure(checkout: Path, command: Sequence[str], folder: Path) -> Call:
    """Run a command; exit with its output if it fails."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment(checkout), cwd=folder, **streams) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        first_line = time.monotonic() - start
        rest = process.stdout.read()
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode not in (0, 1):
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{(first + rest).decode()}")
    return Call(first_line, wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def prepare(folder: Path) -> dict[str, list[str]]:
    """Make a record of three steps and a test of it; return the arguments of Python by verb."""
    model, record = make_tiny_model(folder / "model"), folder / "record"
    config = ROOT / "tests/debug/tiny.yaml"
    options = ["--config", str(config), f"actor.path={model}", f"cluster.fileroot={folder / 'runs'}"]
    script = str(ROOT / "tests/debug/train_tiny.py")
    verb = ["-m", "areal_debug"]
    train = [sys.executable, *verb, "train", script, *options, "--dump-rollout", str(record)]
    measure(ROOT, train, folder)
    (folder / "test_it.py").write_text(TEST.format(record=record))
    return {
        "replay": [*verb, "replay", str(record)],
        "goto": [*verb, "goto", str(record), "--step", "2"],
        "why": [*verb, "why", str(record)],
        "preflight": [*verb, "preflight", *options],
        "pytest, 3 tests": ["-m", "pytest", "-q", "-p", "areal_debug.pytest_plugin", "test_it.py"],
    }


def row(verb: str, calls: list[Call]) -> str:
    middle = [median(getattr(call, name) for call in calls) for name in ("first_line", "wall", "cpu")]
    return f"| {verb} | " + " | ".join(f"{value:.1f}" for value in middle) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--verbs", nargs="+", default=["replay", "goto", "why", "preflight", "pytest, 3 tests"]
    )
    options = parser.parse_args()
    checkouts = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    found: dict[str, list[Call]] = {}
    with tempfile.TemporaryDirectory() as name:
        commands = prepare(Path(name))
        for _ in range(options.rounds):
            for verb in options.verbs:
                for when, checkout in checkouts.items():
                    call = measure(checkout, [sys.executable, *commands[verb]], Path(name))
                    found.setdefault(f"{verb}, {when}", []).append(call)
    print("| verb | first line, s | end, s | CPU s |\n|---|---|---|---|")
    print("\n".join(row(verb, calls) for verb, calls in found.items()))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
