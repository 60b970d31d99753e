"""What benchmarks share: options, timing in turn, peak memory, and results for `make bench`."""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARK = "@peer "
Seconds = tuple[float, float]  # of the wall clock, and of the CPU


class SomeOf(list[str]):
    """The names from which an option chooses, by default all."""


def read_options(
    text: str, arguments: Mapping[str, type] | None = None, /, **defaults: Any
) -> argparse.Namespace:
    """Parse the command line.

    Args:
        text: the help.
        arguments: types of positional arguments by name; `list` takes any number of words.
        defaults: the value of each option, or its type if it must be given. False is a switch, a
            tuple are the choices, of which the first is the default; a list takes several values,
            with spaces or commas between them.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in (arguments or {}).items():
        parser.add_argument(name, **{"nargs": "*"} if kind is list else {"type": kind})
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **rules_of(default))
    options = parser.parse_args()
    for name, default in defaults.items():
        if isinstance(default, list):
            kind = type(default[0]) if default else str
            values = [kind(one) for item in getattr(options, name) for one in str(item).split(",")]
            if isinstance(default, SomeOf) and (unknown := sorted(set(values) - set(default))):
                parser.error(f"--{name} names {', '.join(unknown)}: choose from {', '.join(default)}")
            setattr(options, name, values)
    return options


def rules_of(default: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for an option with this default."""
    if default is False:
        return {"action": "store_true"}
    if isinstance(default, type):
        return {"type": default, "required": True}
    if isinstance(default, tuple):
        return {"choices": default, "default": default[0]}
    if isinstance(default, list):
        return {"nargs": "+", "default": default}
    return {"type": type(default), "default": default}


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of all threads in one run."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def wall_seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def in_turn(
    works: Mapping[str, Callable[[], object]],
    repeats: int,
    seconds: Callable[[Callable[[], object]], Any] = wall_seconds,
) -> dict[str, list[Any]]:
    """Return the times of several runs of each, in turn, so that load affects all alike."""
    rounds = [{name: seconds(work) for name, work in works.items()} for _ in range(repeats)]
    return {name: [times[name] for times in rounds] for name in works}


def best_in_turn(works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the shortest of several runs of each."""
    return {name: min(seconds) for name, seconds in in_turn(works, repeats).items()}


def spread(values: Iterable[float]) -> tuple[float, float, float]:
    found = list(values)
    return statistics.median(found), min(found), max(found)


def say(title: str, pairs: list[tuple[Seconds, Seconds]]) -> None:
    """Print the ratios of the first to the second."""
    for clock, name in enumerate(("wall time", "CPU time")):
        middle, low, high = spread(first[clock] / second[clock] for first, second in pairs)
        print(f"{title}, {name}: {middle:.3f} ({low:.3f} to {high:.3f}, {len(pairs)} pairs)")


def torchrun(name: str, ranks: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a benchmark on several ranks of this machine; exit with its errors if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", f"benchmarks.{name}", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(f"{name} {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return done


def rise_of_peak_mib(work: Callable[[], object]) -> float:
    """Return the MiB by which the peak memory of this process rises in a call."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory_mib("VmRSS")
    work()
    return memory_mib("VmHWM") - before


def memory_mib(name: str) -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024


def in_new_process(measure: Callable[..., float], *arguments: object) -> float:
    """Return what a function returns in a new process, which starts with little memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def git(clone: Path, *arguments: str) -> str:
    """Return the output of a git command in a clone. Raises CalledProcessError."""
    command = ["git", "-C", str(clone), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def report(what: str, beside: str, unit: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
    """Print a comparison of measurements in `unit` that were taken in pairs.

    The ratio is theirs to ours, so above 1 ours is cheaper: median, lowest, highest of the pairs.
    """
    values = {"what": what, "beside": beside, "unit": unit}
    values |= {"ours": statistics.median(ours), "theirs": statistics.median(theirs)}
    values["ratio"] = spread(b / a for a, b in zip(ours, theirs, strict=True))
    print(MARK + json.dumps(values), flush=True)


def report_rate(what: str, tool: str, named: tuple[int, int], accused: tuple[int, int]) -> None:
    """Print how many of the failures a tool names, and how many of the healthy runs it accuses."""
    values = {"what": what, "tool": tool, "named": named[0], "failures": named[1]}
    print(MARK + json.dumps(values | {"accused": accused[0], "healthy": accused[1]}), flush=True)
