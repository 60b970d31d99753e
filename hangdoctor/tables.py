"""The tables of `frames.toml` and `messages.toml`, and what rules and readers of a wait share."""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hangdoctor.frames import TABLES, is_library

USER = "USER"  # as the file of a row: not in a library
# Waits that end only when other ranks arrive: a rank in one is a victim while some rank is not.
PEER_KINDS = ("collective", "p2p", "device", "backward", "store")
# Operations of waits that rules look for. A worker without a task waits in its loop, one with a
# task runs inside it; a server without work waits in the loops of an engine or of events.
WORKER_LOOP, ENGINE_LOOP, EVENT_LOOP = "worker loop", "engine loop", "event loop"
IMPORT_LOCK = "import lock"

# Exit functions that no training step calls.
LAST_CALLS = frozenset(TABLES["calls"]["last"])
# Where a stack begins: in a module, a thread or a spawned process.
MODULE_ENTRIES = tuple(TABLES["calls"]["entries"])
NATIVE_EXIT = re.compile(
    r"exit|Py_(Exit|Finalize(Ex)?|RunMain_exit)|__run_exit_handlers|__cxa_finalize|atexit_callfuncs"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row: what it says of a frame (`value`, `operation`), and the patterns that must match."""

    value: str
    operation: str
    function: re.Pattern[str]
    file: re.Pattern[str] | None

    def matches(self, function: str, file: str) -> bool:
        """Return whether the row is about this frame; `file` is below site-packages."""
        if not self.function.fullmatch(function):
            return False
        return self.file.fullmatch(file) is not None if self.file else not is_library(file)


def row_of(fields: dict[str, str], column: str) -> Row:
    """Parse a row; a call into C is matched by the `text` of its source line."""
    function, file = (fields.get(name) for name in ("function", "file"))
    return Row(
        fields[column],
        fields.get("operation", ""),
        pattern(function or fields.get("text", ".*")),
        None if file == USER else pattern(file or ".*"),
    )


def pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\n\s*", "", text.strip()))


MESSAGES = tomllib.loads(Path(__file__).with_name("messages.toml").read_text(encoding="utf-8"))


def message(module: str, name: str) -> re.Pattern[str]:
    """Return what a module looks for in logs, by its name in `messages.toml`."""
    return pattern(MESSAGES[module][name])


def messages(module: str, name: str) -> tuple[re.Pattern[str], ...]:
    return tuple(pattern(text) for text in MESSAGES[module][name])


ROOTED, P2P = (frozenset(TABLES["calls"][name]) for name in ("rooted", "p2p"))
COLLECTIVE_FILES = tuple(TABLES["calls"]["files"])
COLLECTIVES = ROOTED | set(TABLES["calls"]["collectives"])


def rows(table: str, column: str) -> tuple[Row, ...]:
    return tuple(row_of(fields, column) for fields in TABLES[table] if column in fields)


SPECIFIC, GENERIC = rows("frame", "wait"), rows("frame", "generic_wait")
PHASES, STEPS = rows("frame", "phase"), rows("frame", "step")
NATIVE, KERNEL, DOMAINS = rows("native", "wait"), rows("kernel", "wait"), rows("domain", "name")
SOURCE_WAITS, SOURCE_STEPS = rows("source", "wait"), rows("source", "step")


def first(table: Iterable[Row], function: str, file: str = "") -> tuple[str, str] | None:
    """Return value and operation of the first row that matches a frame."""
    return next(((row.value, row.operation) for row in table if row.matches(function, file)), None)


@lru_cache(maxsize=65536)
def specific_wait(function: str, file: str) -> tuple[str, str] | None:
    """Return (kind, operation) where this frame alone identifies the wait."""
    if file.endswith(COLLECTIVE_FILES):
        if function in COLLECTIVES or function.lstrip("_") in COLLECTIVES:
            return "collective", function
        if function in P2P:
            return "p2p", function
    return first(SPECIFIC, function, file)


@lru_cache(maxsize=65536)
def generic_wait(function: str, file: str) -> tuple[str, str] | None:
    return first(GENERIC, function, file)


@lru_cache(maxsize=65536)
def native_wait(function: str) -> tuple[str, str] | None:
    return first(NATIVE, function[:300])


@lru_cache(maxsize=65536)
def phases_of(function: str, file: str) -> frozenset[str]:
    """Return the phases of the job that one frame indicates."""
    return frozenset(row.value for row in PHASES if row.matches(function, file))


@lru_cache(maxsize=65536)
def domain_of(file: str) -> str:
    """Return the parallel dimension that a library file belongs to, or an empty string."""
    return (first(DOMAINS, "", file) or ("",))[0]
