"""Run inputs of one target at a time in this process, and report before and after each.

    parent --{"target": name}--> stdin;  parent <--{"ready": its bases}-- the descriptor REPORTS
    parent --{"input"} or {"fresh": N, "seed": S}--> stdin
    parent <-- {"start": input} ... {"outcome", "error", "where"} -- the descriptor REPORTS

What the reader prints goes nowhere. The address space is limited, and the peak memory of each input
is measured, so that an input that needs more than a GiB is named.
"""

import faulthandler
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

from .inputs import Input, Mutator, apply
from .targets import Target, load_target

GIB = 1 << 30
MOST_CPU_S = 12.0  # readers in a confined child end themselves after 10
PACKAGES = ("areal_core", "recorder", "replayer", "consistency", "hangdoctor", "areal_debug")
ROOT = Path(__file__).parent.parent.parent
STACK_AFTER_S = 20.0


def memory(name: str) -> int:
    """Return a size of /proc/self/status, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def cpu_seconds() -> float:
    """Return the CPU time of this process and its ended children."""
    of = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in of)


def place_of(error: BaseException) -> str:
    """Return the kind of an error and the last line of our packages that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if any(f.filename.startswith(f"{ROOT}/{name}/") for name in PACKAGES)]
    if not ours:
        return f"{type(error).__name__}: {str(error)[:60]}"
    last = ours[-1]
    return f"{type(error).__name__}@{Path(last.filename).relative_to(ROOT)}:{last.name}:{last.lineno}"


def is_refusal(error: BaseException, allowed: tuple[type[Exception], ...]) -> bool:
    """Return whether an error is one for wrong input that our code raised on purpose.

    A `json.JSONDecodeError` or `UnicodeDecodeError` that comes through names no file and no cure.
    """
    return isinstance(error, allowed) and (
        type(error).__module__.split(".")[0] in PACKAGES or type(error) is ValueError
    )


def run_one(target: Target, bases: dict, given: Input, box: Path) -> dict:
    """Run one input; return its outcome: passed, refused, traceback or memory."""
    outcome = {"outcome": "passed", "error": "", "where": ""}
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, cpu_before_s = memory("VmRSS"), cpu_seconds()
    try:
        target.run(apply(bases[given.base], given.edits), box)
    except Exception as error:
        if is_refusal(error, target.refusals):
            outcome |= {"outcome": "refused", "error": str(error)[:500]}
        else:
            text = "".join(traceback.format_exception(error, limit=-12))
            outcome = {"outcome": "traceback", "error": text[-6000:], "where": place_of(error)}
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    used = max(memory("VmHWM"), children) - before  # a child starts with the pages of this process
    cpu_s = cpu_seconds() - cpu_before_s
    if cpu_s > MOST_CPU_S:
        outcome |= {"outcome": "hang", "where": outcome["where"] or "no error"}
    if used > GIB:
        outcome |= {"outcome": "memory", "where": outcome["where"] or "no error"}
    return outcome | {"bytes": used, "cpu_s": cpu_s}


def main(reports_fd: str, stack_file: str) -> None:
    warnings.simplefilter("ignore")
    reports = os.fdopen(int(reports_fd), "w", buffering=1)
    stacks = open(stack_file, "w")  # noqa: SIM115 (open until the process ends)
    # Below /dev/shm where it exists: thousands of small files.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        box = Path(folder) / "box"
        for line in sys.stdin:
            request = json.loads(line)
            if "target" in request:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                target = load_target(request["target"])
                bases = target.bases(Path(folder) / "bases" / request["target"])
                mutator = Mutator(bases, target.special)
                limit = memory("VmSize") + 2 * GIB
                resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
                print(json.dumps({"ready": sorted(bases)}), file=reports)
                continue
            chance = random.Random(request.get("seed"))
            for _ in range(request.get("fresh", 1)):
                given = Input(**request["input"]) if "input" in request else mutator.input(chance)
                print(json.dumps({"start": vars(given)}), file=reports)
                shutil.rmtree(box, ignore_errors=True)
                box.mkdir()
                os.chdir(box)
                stacks.seek(0)
                stacks.truncate()
                faulthandler.dump_traceback_later(STACK_AFTER_S, file=stacks)
                outcome = run_one(target, bases, given, box)
                faulthandler.cancel_dump_traceback_later()
                print(json.dumps(outcome), file=reports)
            print(json.dumps({"done": True}), file=reports)


if __name__ == "__main__":
    main(*sys.argv[1:])
