"""Read the metrics that frameworks print: verl, SkyRL, slime, miles, OpenRLHF, TRL, prime-rl,
NeMo-RL and AReaL, and our own lines.

A line names a step, has pairs of a name and a number, or both; pairs belong to the step named last.
TRL and Transformers print no step: there a name that comes again begins the next one, at the step of
the progress bar, or `logging_steps` later; without both, and in a log that names no step at all, it
is the number of a row. A line of names between tabs or bars is the header of the rows behind it.
"""

import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import chain
from pathlib import Path

from areal_core.safety.received import lines_received
from areal_debug.doctor.sources.plain_files import ROW, Row

MAX_LINE = 200_000
NUMBER = r"-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|nan|inf)"
NOISE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|^(?:DEBUG|INFO|WARNING):[\w.]+:\s*")  # colours, Python's logging
STEP = re.compile(
    r"(?i)(?<![a-z_/.'\"])(?:step|iter(?:ation)?)\s*[:=#]?\s*(\d{1,12})(?![\d.]\d)"
    r"|(?<![a-z_/.'\"])(?:rollout|perf|eval|passrate)\s(\d{1,12}):\s*\{"
)
OF_STEP = ("step", "iteration", "iter")
MICRO = re.compile(r"(?i)\bmicro[ _-]?(?:step|batch)")
IN_DICT = re.compile(
    r"['\"]([A-Za-z_][\w./@ :-]{0,150})['\"]\s*:\s*(?:[\w.]{1,20}\()?['\"]?(" + NUMBER + r")(?=[\s,}'\")]|$)"
)
OWN_STEP = re.compile(r"['\"](?:global_step/max_steps|global_step|step)['\"]\s*:\s*['\"]?(\d{1,12})")
DASHED = re.compile(r"([A-Za-z_][\w./@-]{0,150}):(?:[\w.]{1,20}\()?(" + NUMBER + r")\)?$")
FIELD = re.compile(r"([A-Za-z][\w ./()-]{0,60}?):?\s+(" + NUMBER + r")\s*(%?)(?:\s*[A-Za-z/]{1,12})?$")
BULLET = re.compile(r"\s*[•*]\s+([A-Za-z][\w ./()-]{0,60}):\s+(" + NUMBER + r")(?=[\s(%]|$)\s*(%?)")
PLAIN = re.compile(r"\s*([A-Za-z][\w ./()-]{0,60}?)\s*[:=]\s*(" + NUMBER + r")\s*(%?)\s*$")
CELLS = re.compile(r"[|│┃\t]|,(?= )|\.(?= [A-Z])")
WIDE = re.compile(r"(?<=\w )" + NUMBER + r"\s{2,}[A-Za-z]")  # of `reward 0.4  loss 0.1`
COLUMNS = re.compile(r"\t|\s*[|│┃]\s*")
# `epoch: 5  loss: 0.2`, where one of the names is a metric's
SPACED = re.compile(r"([A-Za-z_][\w./@-]{0,150})\s*[:=]\s*(" + NUMBER + r")(?=[\s;]|$)")
METRIC = re.compile(r"(?i)loss|reward|grad_norm|entropy|(?<![a-z])kl(?![a-z])|clip_?(?:ped|frac|ratio)")
BAR = re.compile(r":?\s*\d{1,3}%\|.*?(?=,\s*[A-Za-z_]+=|$)")  # of tqdm, up to the pairs at its end
DONE = re.compile(r"\s*\d{1,3}%\|[^|]*\|\s*(\d+)/(\d+)\s*\[")  # a bar without a label: of training
LOGGING_STEPS = re.compile(r"\blogging_steps['\"]?\s*[=:]\s*(\d+)(?![\d.])")
EPOCH = re.compile(r"(?i)\bepoch\s*[:=#]?\s*(\d+)\b(?!\.)")
NAME = re.compile(r"[A-Za-z_][\w./@ -]{0,150}")
BARE = re.compile(NUMBER + "|No Log")  # of a notebook: nothing was logged


def read_console(file: Path, run: str = "") -> Iterable[Row]:
    """Return the numbers of a console log by step; bytes that are no text are replaced."""
    return rows_of(lines_received(file))


def rows_of(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the numbers of each line with a step."""
    step: int | None = None
    counted, seen, bars, every = 0, set[str](), dict[str, int](), 0
    epoch, last, begins = -1, -1, 0  # of a log whose steps begin again in each epoch
    header: list[str] = []
    for line in chain.from_iterable(line[:MAX_LINE].split("\r") for line in lines):
        if bar := DONE.match(line):
            bars[bar[2]] = int(bar[1])
        elif found := LOGGING_STEPS.search(line):
            every = int(found[1])
            continue
        line = BAR.sub("", NOISE.sub("", line)).rstrip()
        if MICRO.search(line):
            continue
        cells = COLUMNS.split(line.strip("| "))
        is_table = len(cells) > 2 or (cells[0].lower() in OF_STEP and len(cells) == 2)
        if is_table and all(map(NAME.fullmatch, cells)):
            header = [re.sub(r"\s*/\s*", "/", cell) for cell in cells]
        elif header and len(cells) == len(header) and all(map(BARE.fullmatch, cells)):
            yield {name: cell for name, cell in zip(header, cells, strict=True) if cell != "No Log"}
            continue
        if WIDE.search(line):
            line = re.sub(r"\s{2,}", " | ", line)
        named = [int(first or second) for first, second in STEP.findall(line)]
        if named:
            if (found := EPOCH.search(line)) and int(found[1]) > epoch:
                begins += last + 1 if named[-1] <= last else 0
                epoch = int(found[1])
            last = named[-1]
            step = begins + last
        around = STEP.split(line)
        rest = around[-1].lstrip(":. ") or around[0].rstrip(", ")  # the step may stand at the end
        if named and "{" not in line and (CELLS.search(line) or PLAIN.fullmatch(rest)):
            line = f"step {step} | {rest}"  # of `iteration 5: lm loss: 3.0 | grad norm: 1.0`
        pairs = {name: number for name, number in pairs_of(line) if name.lower() not in OF_STEP}
        if not pairs:
            continue
        if named:
            yield {**pairs, "step": step}
        elif own := OWN_STEP.search(line):
            yield {**pairs, "step": int(own[1])}
        elif "epoch" in pairs or step is None:  # of Transformers, and of a log without steps
            at = next(iter(bars.values()), 0) if "epoch" in pairs else 0  # evaluations come later
            if not seen.isdisjoint(pairs) or (not seen and (at or every)):
                counted, seen = max(at, counted + (every or 1)), set()
            seen.update(name for name in pairs if name != "epoch")
            yield {**pairs, "step" if at or every else ROW: counted}
        elif step is not None:
            yield {**pairs, "step": step}


def pairs_of(line: str) -> Iterator[tuple[str, str]]:
    """Yield names and numbers as printed; a percentage as the share that it is."""
    quoted = IN_DICT.findall(line) if "'" in line or '"' in line else []
    if "{" in line or len(quoted) > 2:
        found = [(name, number, "") for name, number in quoted]
    elif CELLS.search(line):
        found = list(in_cells([cell.strip() for cell in CELLS.split(line)]))
    elif " - " in line:
        matches = [DASHED.search(piece.strip()) for piece in line.split(" - ")]
        found = [(match[1], match[2], "") for match in matches if match is not None]
    else:
        bullet = BULLET.match(line) or PLAIN.fullmatch(line)
        found = [] if bullet is None else [(bullet[1], bullet[2], bullet[3])]
    spaced = SPACED.findall(line) if not found and "{" not in line and METRIC.search(line) else []
    if len(spaced) > 1:
        found = [(name, number, "") for name, number in spaced]
    for name, number, percent in found:
        yield name.strip(), str(Decimal(number) / 100) if percent else number


def in_cells(cells: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield pairs of `Name 0.5`, and of a cell with a name and the next one with its number."""
    before = ""
    for cell in cells:
        if BARE.fullmatch(cell) and before:
            yield before, cell, ""
        elif field := FIELD.fullmatch(cell) or PLAIN.fullmatch(cell.rstrip("]")):
            yield field[1], field[2], field[3]
        else:
            yield from ((name, number, "") for name, number in SPACED.findall(cell))
        before = cell if NAME.fullmatch(cell) else ""
