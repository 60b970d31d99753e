"""Movement of a process between samples: its place in the program, its context switches, its CPU
time.
"""

from itertools import pairwise

from hangdoctor.frames import is_library, python_only
from hangdoctor.model import Frame, ProcessDump, ProcessFacts
from hangdoctor.waits import Stance

# Measured: the main thread of a hung rank is not switched to once between two samples; that of a
# rank which makes steps is switched to at least 20 times a second, however loaded the machine.
RAN_SWITCHES = 5
BUSY_CPU_FRACTION = 0.5


def has_moved(mains: list[Stance], dumps: list[ProcessDump], stance: Stance) -> bool:
    """Return whether the main thread was elsewhere in the user's program, or ran through its waits,
    between two samples.
    """
    for before, after in pairwise(mains):
        if before is after:
            continue
        if call_path(before) != call_path(after) or leaf(before) != leaf(after):
            return True
    first, last = dumps[0].facts.voluntary_switches, dumps[-1].facts.voluntary_switches
    spins = (cpu_fraction(dumps) or 0.0) > BUSY_CPU_FRACTION
    woken = first is not None and last is not None and last - first >= RAN_SWITCHES
    return stance.kind in ("collective", "p2p") and woken and not spins


def call_path(stance: Stance) -> tuple[Frame, ...]:
    """Return the program's own calls; in a process that runs a library only, such as an engine, the
    library's.
    """
    return stance.chain or python_only(stance.frames)


def leaf(stance: Stance) -> Frame | None:
    """Return the innermost frame that identifies a place in the program: lines inside a library's
    polling loop do not.
    """
    python = python_only(stance.frames)
    if not python or (stance.kind not in ("running", "blocked") and is_library(python[0].file)):
        return None
    return python[0]


def has_run(dumps: list[ProcessDump]) -> bool | None:
    """Return whether the kernel ran the main thread between the first and the last sample."""
    first, last = switches(dumps[0].facts), switches(dumps[-1].facts)
    return None if len(dumps) < 2 or first is None or last is None else last - first >= RAN_SWITCHES


def switches(facts: ProcessFacts) -> int | None:
    """Return voluntary plus involuntary context switches, or None where either is unknown."""
    if facts.voluntary_switches is None or facts.involuntary_switches is None:
        return None
    return facts.voluntary_switches + facts.involuntary_switches


def cpu_fraction(dumps: list[ProcessDump]) -> float | None:
    """Return CPU seconds per second between first and last sample, or None where unknown."""
    first, last = dumps[0], dumps[-1]
    before, after = first.facts.cpu_s, last.facts.cpu_s
    if before is None or after is None or first.time is None or last.time is None or last.time <= first.time:
        return None
    return (after - before) / (last.time - first.time)
