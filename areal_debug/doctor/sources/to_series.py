"""Rows of metrics to series: which number of a row is its step, and what its names are."""

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from areal_debug.doctor.names import TEXTS
from areal_debug.doctor.series import Series
from areal_debug.doctor.sources.plain_files import ROW, Row

STEP_NAMES: list[str] = TEXTS["steps"]["own"]
# A step of its own beside Weights & Biases' count of calls: of slime, OpenRLHF, Transformers, verl.
STEP_OF_PHASE = re.compile(
    r"(?:train|rollout|eval|val|validation|test|trainer|training)/(?:global_step|global_iter|step)"
    r"|time/total_timesteps"
)
CONTAINERS = ("data", "metrics", "logs", "log", "stats", "scalars")  # add nothing to a name
TRAINING = "train/"  # the prefix that loggers add to training metrics
MAX_DEPTH = 4
FIXED = re.compile(r"-?\d*\.(\d+0)")  # what prints 0.000 or 0.50 has cut digits off; 0.0 and 0.5 are exact

PART = re.compile(r"(\d+)/\d+")  # `9/547`: of so many


class Rounded(float):
    """A number that was printed with a fixed number of decimals."""

    resolution: float


def collect(rows: Iterable[Row]) -> dict[str, Series]:
    """Collect rows into series; if a step was logged more than once, the last value is kept."""
    values: dict[str, tuple[array[int], array[float]]] = {}  # 16 bytes a number
    resolution: dict[str, float] = {}
    units: dict[str, str] = {}
    for step, numbers, unit in numbered(rows):
        for name, number in numbers.items():
            name = name.removeprefix(TRAINING)
            steps, numbers_by_step = values.setdefault(name, (array("q"), array("d")))
            steps.append(step)
            units[name] = unit
            numbers_by_step.append(number)
            if isinstance(number, Rounded):
                resolution[name] = min(number.resolution, resolution.get(name, 1.0))
    found = {}
    for name, (logged_at, logged) in values.items():
        at, last = np.unique(np.frombuffer(logged_at, np.int64)[::-1], return_index=True)
        kept = np.frombuffer(logged, np.float64)[::-1][last]
        found[name] = Series(name, at, kept, resolution.get(name, 0.0), units[name])
    return found


def numbered(rows: Iterable[Row]) -> Iterator[tuple[int, dict[str, float], str]]:
    """Yield the step and the other numbers of each row of metrics, and "step" or "row".

    If no row names a step they are counted: a name that comes again begins the next one. Rows with
    text or lists are samples then.
    """
    unnamed: list[dict[str, float]] | None = []
    for row in rows:
        if isinstance(row, dict) and isinstance(row.get("key"), str) and "value" in row:
            row = {"step": row.get("step"), row["key"]: row["value"]}  # of MLflow: one number each
        numbers = dict(numbers_of(row)) if isinstance(row, dict) else {}
        name = name_of_step(numbers)
        if name is not None and abs(numbers[name]) < 2**63:
            unnamed = None
            yield int(numbers.pop(name)), numbers, "row" if name == ROW else "step"
        elif (
            name is None
            and unnamed is not None
            and numbers
            and all(value is None or as_number(value) is not None for value in row.values())
        ):
            unnamed.append(numbers)
    step, seen = 0, set[str]()
    for numbers in unnamed or ():
        names = numbers.keys() - {"epoch", "Epoch"}
        if not seen.isdisjoint(names):
            step, seen = step + 1, set()
        seen |= names
        yield step, numbers, "row"


def name_of_step(numbers: Mapping[str, float]) -> str | None:
    of_phase = (name for name in numbers if STEP_OF_PHASE.fullmatch(name))
    names = (name for known in ([*STEP_NAMES, ROW], of_phase, TEXTS["steps"]["others"]) for name in known)
    return next((name for name in names if name in numbers), None)


def numbers_of(row: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row; names of nested objects are joined with `/`."""
    for name, value in row.items():
        if isinstance(value, dict):
            if depth < MAX_DEPTH and "_type" not in value:  # of Weights & Biases: a histogram, a file
                inner = prefix if not prefix and name in CONTAINERS else f"{prefix}{name}/"
                yield from numbers_of(value, inner, depth + 1)
        elif (number := as_number(value)) is not None:
            yield f"{prefix}{name}", number


def as_number(value: Any) -> float | None:
    """Convert a number, or text that spells one; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str) and (part := PART.fullmatch(value)):
        value = part[1]
    if isinstance(value, str) and (fixed := FIXED.fullmatch(value.strip())):
        number = Rounded(value)
        number.resolution = 10.0 ** -len(fixed[1])
        return number
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):
        return None
