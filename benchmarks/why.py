"""How often `areal-debug why` finds a planted bug: stage, pattern, and commit or setting.

    python -m benchmarks.why [--keep FOLDER] [--jobs 2] [--only NAME ...] [--make] [--json FILE]

Each plant of benchmarks/why_plants/ is a difference between two runs of a tiny model: a commit
among innocent ones, an option, a variable, a file of the user, a library; pairs differ in what
changes no number. Both runs are recorded, then `areal-debug why A B --json` is scored against the
truth: the verdict, the stage, the pattern, and the cause, which is right if its kind is and if it
names the commit, the file, or the setting. With --keep, records are made once and scored often.

Exits with 1 if a rate is below its target, or an equal pair is accused.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, SomeOf, read_options
from benchmarks.why_plants.making import Made, RunFailed, Workshop
from benchmarks.why_plants.plants import Plant, Truth, read_plants
from recorder import open_record
from replayer.compare.stages import read_outcomes
from replayer.diff import diff_records

TIMEOUT_S = 900
NUM_STAGE, NUM_CAUSE = 0.95, 0.90  # targets: stage and pattern; commit or setting
# commands of a user who knows the verbs, before `why`: diff; diff and bisect; diff, twice
# `goto --save`, and consistency; diff and a replay
COMMANDS_BEFORE = {
    "code": 2, "config": 1, "environment": 1, "data": 1, "engine": 4, "nondeterminism": 2, "equal": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What the command said, and in how many seconds; `error` if it could not be read."""

    verdict: str | None
    stage: str | None
    pattern: str | None
    cause: str | None
    names: str
    line: int | None
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class Score:
    """Which answers of a plant are right; `line` is None where there is no line to name."""

    name: str
    kind: str
    verdict: bool
    stage: bool
    pattern: bool
    cause: bool
    line: bool | None
    answer: Answer
    has_pattern: bool = False  # one has to be named: None is no right answer

    @property
    def found(self) -> bool:
        """True if stage and pattern are right."""
        return self.stage and self.pattern


def main() -> int:
    every = read_plants()
    options = read_options(
        __doc__,
        keep="",
        only=SomeOf(plant.name for plant in every),
        jobs=2,
        commit="HEAD",
        make=False,
        json="",
    )
    plants = [plant for plant in every if plant.name in options.only]
    with tempfile.TemporaryDirectory() as temporary:
        workshop = Workshop(Path(options.keep or temporary).resolve(), options.commit)
        made = {one.name: one for one in in_threads(partial(try_to_make, workshop), plants, options.jobs)}
        if options.make:
            return 0
        ask = partial(score, workshop, made)
        scores = list(in_threads(ask, [plant for plant in plants if plant.name in made], options.jobs))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(one) for one in scores], indent=1))
    print(render(scores, len(plants) - len(made)))
    return 0 if is_good(scores) and len(made) == len(plants) else 1


def in_threads(do: Callable[[Plant], Any], plants: Sequence[Plant], num_threads: int) -> Iterable[Any]:
    """Return the results of a function of each plant that are not None, in the plants' order."""
    with ThreadPoolExecutor(num_threads) as pool:
        return [result for result in pool.map(do, plants) if result is not None]


def try_to_make(workshop: Workshop, plant: Plant) -> Made | None:
    """Make a plant's records, and check that they are of its kind; None if that fails."""
    begin = time.monotonic()
    try:
        made = workshop.make(plant)
        is_equal = diff_records(open_record(made.left), open_record(made.right)).same
        if is_equal != (plant.truth is None):
            raise RunFailed(
                "the numbers are " + ("equal: the plant changes none" if is_equal else "not equal")
            )
    except (RunFailed, ValueError) as error:
        print(f"{plant.name}: cannot be made: {error}", file=sys.stderr, flush=True)
        return None
    print(f"{plant.name}: made, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return made


def has_equal_weights(made: Made) -> bool:
    """Return whether all steps that both records have end with the same weights."""
    left, right = open_record(made.left), open_record(made.right)
    for step in sorted(set(left.steps) & set(right.steps)):
        here, there = read_outcomes(left.step(step)), read_outcomes(right.step(step))
        if here[0].checksums != there[0].checksums:
            return False
    return True


def score(workshop: Workshop, made: dict[str, Made], plant: Plant) -> Score:
    """Run the command on a plant's records and compare what it says with the truth."""
    one = made[plant.name]
    answer = ask(workshop, one)
    if plant.truth is None:
        right = answer.verdict == "identical" and answer.error is None
        return Score(plant.name, plant.kind, right, right, right, right, None, answer)
    if answer.error is not None:
        return Score(plant.name, plant.kind, False, False, False, False, None, answer)
    truth: Truth = plant.truth
    verdicts = {"same weights, other numbers"} if has_equal_weights(one) else {"diverged"}
    wanted = [*truth.named, *([one.commit[:7]] if one.commit else [])]
    cause = answer.cause in truth.causes and any(name in answer.names for name in wanted)
    line = None
    if one.first_line is not None and one.last_line is not None:
        line = answer.line is not None and one.first_line - 3 <= answer.line <= one.last_line + 3
    return Score(
        plant.name,
        plant.kind,
        answer.verdict in verdicts,
        answer.stage in truth.stages,
        answer.pattern in truth.patterns,
        cause,
        line,
        answer,
        None not in truth.patterns,
    )


def ask(workshop: Workshop, made: Made) -> Answer:
    """Run `why` on two records and parse what it prints."""
    command = [sys.executable, "-m", "areal_debug", "why", made.left, made.right, "--json"]
    command += ["--repository", str(workshop.clone)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
        seconds = time.monotonic() - begin
        said = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return Answer(None, None, None, None, "", None, TIMEOUT_S, f"no answer in {TIMEOUT_S} s")
    except json.JSONDecodeError:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        return Answer(None, None, None, None, "", None, seconds, f"code {done.returncode}: {lines[-1]}")
    return parse_why(said, seconds)


def parse_why(said: dict[str, Any], seconds: float) -> Answer:
    pattern, cause = said["pattern"], said["cause"] or {"kind": None, "line": None}
    kind = pattern["kind"] if isinstance(pattern, dict) else pattern
    return Answer(
        said["verdict"], said["stage"], kind, cause["kind"], json.dumps(cause), cause["line"], seconds
    )


def rate(values: Iterable[bool]) -> float:
    """Return the share of values that are true, 1.0 of none."""
    counted = list(values)
    return sum(counted) / len(counted) if counted else 1.0


def is_good(scores: Sequence[Score]) -> bool:
    """Return whether every rate reaches its target."""
    bugs = [one for one in scores if one.kind != "equal"]
    pairs = [one for one in scores if one.kind == "equal"]
    return (
        rate(one.found for one in bugs) >= NUM_STAGE
        and rate(one.cause for one in bugs) >= NUM_CAUSE
        and all(one.verdict for one in pairs)
    )


def render(scores: Sequence[Score], num_failed: int) -> str:
    """Return the table of all scores, and the rates."""
    rows = [("plant", "kind", "verdict", "stage", "pattern", "cause", "line", "s", "it said")]
    for one in scores:
        said = one.answer
        marks = [mark(value) for value in (one.verdict, one.stage, one.pattern, one.cause, one.line)]
        what = said.error or f"{said.verdict}; {said.stage}; {said.pattern}; {said.cause} {said.names}"
        rows.append((one.name, one.kind, *marks, f"{said.seconds:.0f}", what[:150]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    bugs = [one for one in scores if one.kind != "equal"]
    pairs = [one for one in scores if one.kind == "equal"]
    with_pattern = [one.pattern for one in bugs if one.has_pattern]
    with_line = [one.line for one in bugs if one.line is not None]
    lines += [
        "",
        f"bugs: {len(bugs)}; verdict {rate(one.verdict for one in bugs):.0%}, "
        f"stage {rate(one.stage for one in bugs):.0%}, pattern {rate(one.pattern for one in bugs):.0%} "
        f"({rate(with_pattern):.0%} of the {len(with_pattern)} that have one), "
        f"stage and pattern {rate(one.found for one in bugs):.0%}, "
        f"commit or setting {rate(one.cause for one in bugs):.0%}, "
        f"line {rate(with_line):.0%} of {len(with_line)} commits",
        f"equal pairs: {len(pairs)}; accused: {sum(not one.verdict for one in pairs)}",
    ]
    if num_failed:
        lines.append(f"not made: {num_failed}")
    if bugs:
        times = [one.answer.seconds for one in bugs]
        before = statistics.median(COMMANDS_BEFORE[one.kind] for one in bugs)
        lines.append(
            f"median time {statistics.median(times):.1f} s, longest {max(times):.1f} s; commands of a user: 1, "
            f"before `why` {before:.0f} (at most {max(COMMANDS_BEFORE[one.kind] for one in bugs)})"
        )
    return "\n".join(lines)


def mark(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "NO"


if __name__ == "__main__":
    sys.exit(main())
