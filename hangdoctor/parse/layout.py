"""The files of a collection by their place: `samples/1/rank_3.native.txt`, `proc/0/rank_3.json`,
`env/...`.
"""

import json
import math
from dataclasses import dataclass, replace
from typing import Any, get_args

from hangdoctor.errors import HangInputError, UnreadableDump
from hangdoctor.model import GpuFacts, ProcessFacts, Status

FOLDERS = ("samples", "proc", "env", "gpu", "logs", "errors", "fr", "ras", "source")
PER_SAMPLE = ("samples", "proc", "gpu")
VERSION = 1


@dataclass(frozen=True, slots=True)
class Place:
    """`kind` is one of `FOLDERS`, or `loose` for any other file; `sample` is None when loose."""

    kind: str
    file: str
    sample: int | None = None


@dataclass(frozen=True, slots=True)
class ExpectedProcess:
    """One entry of `processes` in collection.json."""

    name: str
    rank: int | None
    role: str
    host: str | None
    pid: int | None
    parent: str | None
    status: Status
    detail: str
    command: str


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of collection.json."""

    world_size: int | None
    times: tuple[float | None, ...]
    processes: tuple[ExpectedProcess, ...]
    hosts_missing: tuple[str, ...]


def place_of(path: str) -> Place:
    """Return the meaning of a relative path. Folders above the collection's own are ignored."""
    parts = path.replace("\\", "/").split("/")
    for at, part in enumerate(parts[:-1]):
        rest = parts[at + 1 :]
        if part in PER_SAMPLE and len(rest) == 2 and rest[0].isdigit():
            return Place(part, rest[1], int(rest[0][:6]))
        if part in FOLDERS and part not in PER_SAMPLE and len(rest) == 1:
            return Place(part, rest[0])
    return Place("loose", parts[-1])


def object_from(data: bytes, what: str) -> Any:
    """Decode JSON. Raises `UnreadableDump`."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnreadableDump(f"{what} is not JSON: {error}") from error


def contents_from(data: bytes) -> Contents:
    """Parse collection.json. Raises `HangInputError` for another format or a newer version."""
    document = object_from(data, "collection.json")
    if not isinstance(document, dict) or document.get("format") != "hangdoctor-collection":
        raise HangInputError(
            "collection.json is not hangdoctor's: its 'format' is not 'hangdoctor-collection'."
        )
    version = document.get("version")
    if version != VERSION:
        raise HangInputError(
            f"collection.json has version {version!r} and this program reads {VERSION}. "
            "Diagnose it with the version of areal-debug that collected it, or a newer one."
        )
    try:
        return Contents(
            world_size=number(document.get("world_size")),
            times=tuple(real(sample.get("time")) for sample in document.get("samples", ())),
            processes=tuple(expected_from(entry) for entry in document.get("processes", ())),
            hosts_missing=tuple(
                f"{host.get('host')}: {host.get('status')} {host.get('detail') or ''}".strip()
                for host in document.get("hosts", ())
                if host.get("status") != "ok"
            ),
        )
    except (TypeError, AttributeError) as error:
        raise HangInputError(f"collection.json is damaged: {error}. Collect again.") from error


def expected_from(entry: dict[str, Any]) -> ExpectedProcess:
    """Parse one entry of `processes`; an unknown status counts as `gone`."""
    known: dict[Any, Status] = {status: status for status in get_args(Status)}
    return ExpectedProcess(
        name=str(entry.get("name")),
        rank=number(entry.get("rank")),
        role=str(entry.get("role") or "trainer"),
        host=text(entry.get("host")),
        pid=number(entry.get("pid")),
        parent=text(entry.get("parent")),
        status=known.get(str(entry.get("status")), "gone"),
        detail=str(entry.get("detail") or ""),
        command=str(entry.get("command") or ""),
    )


def facts_from(data: bytes) -> ProcessFacts:
    """Parse proc/K/NAME.json; values of a wrong type are unknown. Raises `UnreadableDump`."""
    document = object_from(data, "proc")
    if not isinstance(document, dict):
        raise UnreadableDump("a proc file is one object")
    facts = ProcessFacts(
        state=text(document.get("state")),
        wchan=text(document.get("wchan")),
        parent_pid=number(document.get("parent_pid")),
        cpu_s=real(document.get("cpu_s")),
        voluntary_switches=number(document.get("voluntary_switches")),
        involuntary_switches=number(document.get("involuntary_switches")),
        start_time=real(document.get("start_time")),
    )
    # Kernels and sandboxes that hide the symbol print 0.
    return replace(facts, wchan=None) if facts.wchan in ("0", "") else facts


def gpus_from(data: bytes, host: str, sample: int) -> tuple[GpuFacts, ...]:
    """Parse gpu/K/HOST.json. Raises `UnreadableDump`."""
    document = object_from(data, "gpu")
    if not isinstance(document, list) or not all(isinstance(gpu, dict) for gpu in document):
        raise UnreadableDump("a gpu file is an array of objects")
    return tuple(
        GpuFacts(
            host,
            number(gpu.get("index")) or 0,
            sample,
            real(gpu.get("utilization_percent")),
            real(gpu.get("power_watts")),
        )
        for gpu in document
    )


def source_from(data: bytes) -> dict[str, str]:
    """Parse `FILE:LINE` to the text of that line. Raises `UnreadableDump`."""
    document = object_from(data, "source")
    if not isinstance(document, dict):
        raise UnreadableDump("a source file is one object")
    return {str(place): str(line)[:200] for place, line in document.items()}


def environment_from(data: bytes) -> tuple[tuple[str, str], ...]:
    """Parse env/NAME.json into sorted pairs. Raises `UnreadableDump`."""
    document = object_from(data, "env")
    if not isinstance(document, dict):
        raise UnreadableDump("an env file is one object")
    return tuple(sorted((str(name), str(value)) for name, value in document.items()))


def number(value: Any) -> int | None:
    """Return an integer of at most 63 bits, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def real(value: Any) -> float | None:
    """Return a finite number as a float, or None."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable and abs(value) < 2**63 else None


def text(value: Any) -> str | None:
    """Return a string, or None for another type."""
    return value if isinstance(value, str) else None
