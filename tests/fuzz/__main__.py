"""`make fuzz SECONDS=600 [TARGET=record]`: fresh inputs for all targets, failures minimised.

`python -m tests.fuzz replay FILE.json...` runs inputs again, those of the corpus or failures; the
target is the name of the file's folder.
"""

import sys
import time
from pathlib import Path

from .guard import FAILED, Outcome, Tally, minimised, run_fresh, run_inputs
from .inputs import Input
from .targets import MODULES

LEAST_SECONDS = 10  # a target
FOUND = Path("runs/fuzz")


def parse_arguments(seconds: str, target: str) -> tuple[float, list[str]]:
    """Return the seconds of each target, and the targets. Raises ValueError."""
    if target and target not in MODULES:
        raise ValueError(f"TARGET is {target!r}; expected one of {', '.join(MODULES)}")
    names = [target] if target else list(MODULES)
    least = LEAST_SECONDS * len(names)
    if not (seconds.isascii() and seconds.isdecimal() and len(seconds) < 8 and int(seconds) >= least):
        raise ValueError(
            f"SECONDS is {seconds!r}; expected a whole number of at least {least}, "
            f"{LEAST_SECONDS} for each target"
        )
    return int(seconds) / len(names), names


def line_of(name: str, tally: Tally) -> str:
    broken = tally.kinds.get("traceback", 0) + tally.kinds.get("died", 0)
    hangs, large = tally.kinds.get("hang", 0), tally.kinds.get("memory", 0)
    return (
        f"{name:<16}{tally.num_inputs:>9,}{broken:>12}{hangs:>11}{large:>12}"
        f"{tally.most_cpu_s:>12.1f}{tally.largest_bytes >> 20:>10,}"
    )


def keep(name: str, outcome: Outcome, folder: Path) -> Path:
    """Write the minimised input and what it caused; return the file of the input."""
    small = minimised(name, outcome)
    (folder / name).mkdir(parents=True, exist_ok=True)
    file = folder / name / f"{len(list((folder / name).glob('*.json'))):03}.json"
    file.write_text(small.given.to_json() + "\n")
    file.with_suffix(".txt").write_text(f"{small.kind} {small.where}\n\n{small.error}\n")
    return file


def fuzz(seconds: str, target: str) -> int:
    try:
        each_s, names = parse_arguments(seconds, target)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    seed = time.time_ns()
    print(f"seed {seed}, {each_s:.0f} s for each target; failing inputs go to {FOUND / str(seed)}")
    print("target            inputs  tracebacks  over 10 s  over 1 GiB  most CPU s  most MiB")
    failed = False
    for name in names:
        tally = run_fresh(name, 0, seed, each_s)
        print(line_of(name, tally), flush=True)
        for place, outcome in tally.failures.items():
            print(f"  {place}: {keep(name, outcome, FOUND / str(seed))}", flush=True)
        failed |= bool(tally.failures)
    return 1 if failed else 0


def replay(files: list[Path]) -> int:
    failed = False
    for file in files:
        tally = run_inputs(file.absolute().parent.name, [Input.from_json(file.read_text())])
        (kind,) = tally.kinds
        print(f"{file}: {kind}", *(f"{place}\n{one.error}" for place, one in tally.failures.items()))
        failed |= kind in FAILED
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["replay"]:
        sys.exit(replay([Path(name) for name in sys.argv[2:]]))
    sys.exit(fuzz(*sys.argv[1:]))
