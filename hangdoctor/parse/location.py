"""What a file is and whose process it shows, from its path in a collection:
`samples/1/rank_3.native.txt`, `proc/0/host-2_rank_17.json`, `env/engine_rank_1.txt`.
"""

import json
import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, get_args

from hangdoctor.collect.write import FORMAT, VERSION, ProcessEntry
from hangdoctor.errors import HangInputError, UnreadableDump
from hangdoctor.model import GpuFacts, ProcessFacts, Status

FOLDERS = ("samples", "proc", "env", "gpu", "logs", "errors", "fr", "ras", "source")
PER_SAMPLE = ("samples", "proc", "gpu")
ROLES = {
    "engine": "engine",
    "rollout": "engine",
    "sglang": "engine",
    "vllm": "engine",
    "server": "engine",
    "inference": "engine",
    "reference": "reference",
    "ref": "reference",
    "reward": "reward",
    "proxy": "proxy",
    "critic": "critic",
    "trainer": "trainer",
    "actor": "trainer",
    "train": "trainer",
}
RANKED = re.compile(
    r"^(?P<before>.*?)(?<![a-z])rank[_\-.= ]?(?P<rank>\d{1,7})(?!\d)(?:[_\-.]child[_\-.]?(?P<child>\d{1,6}))?",
    re.I,
)
PLAIN = re.compile(r"rank_(\d{1,7})\.json")  # the usual name, parsed six times as fast
BARE = re.compile(r"^(?:worker|gpu|r|proc)?[_\-]?(?P<rank>\d{1,6})$", re.I)
LOCAL_RANK = re.compile(r"--(?:local[_-])?rank[= ](\d{1,6})\b")
# Engines rename their processes: `sglang::scheduler_PP1_TP0`, `VLLM::Worker_TP3`.
COORDINATE = re.compile(r"_(DP|PP|TP|EP)(\d{1,5})")
# File names that stand before `rank` where others have a host.
COLLECTORS = re.compile(r"(?:stacks?|py[-_]?spy|dump|(?:nccl_|comm_lib_)?trace|fr)?", re.I)
STATUSES: dict[str, Status] = {status: status for status in get_args(Status)}
SUFFIXES = (".native", ".error", ".stacktrace", ".pyspy", ".dump", ".stack", ".trace")
# File endings of formats, so that `rank_3.pickle` and `nccl_trace_rank_3` have the same stem.
ENDINGS = (".json", ".txt", ".log", ".pickle", ".pkl", ".out", ".err", ".bin", ".gz", ".md")


@dataclass(frozen=True, slots=True)
class Place:
    """`kind` is one of `FOLDERS`, or `loose` for any other file; `sample` is None when loose."""

    kind: str
    file: str
    sample: int | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of collection.json."""

    world_size: int | None
    times: tuple[float | None, ...]
    processes: tuple[ProcessEntry, ...]
    hosts_missing: tuple[str, ...]


def place_of(path: str) -> Place:
    """Return the meaning of a relative path. Folders above the collection's own are ignored."""
    folder, _, file = path.replace("\\", "/").rpartition("/")
    kind, sample = kind_of(folder)
    return Place(kind, file, sample)


@lru_cache(maxsize=1024)
def kind_of(folder: str) -> tuple[str, int | None]:
    """Return kind and sample of the files of a folder."""
    *_, above, last = ["", "", *folder.split("/")]
    if above in PER_SAMPLE and last.isdecimal():
        return above, int(last[:6])
    return (last, None) if last in FOLDERS and last not in PER_SAMPLE else ("loose", None)


def decoded(data: bytes, what: str) -> Any:
    """Decode JSON. Raises `UnreadableDump`."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnreadableDump(f"{what} is not JSON: {error}") from error


def object_from(data: bytes, what: str) -> dict[str, Any]:
    """Decode a JSON object. Raises `UnreadableDump`."""
    document = decoded(data, what)
    if not isinstance(document, dict):
        raise UnreadableDump(f"{what} is one object; got something else")
    return document


def contents_from(data: bytes) -> Contents:
    """Parse collection.json. Raises `HangInputError` for another format or a newer version."""
    document = decoded(data, "collection.json")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise HangInputError(f"collection.json is not hangdoctor's: its 'format' is not {FORMAT!r}.")
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


def expected_from(entry: dict[str, Any]) -> ProcessEntry:
    """Parse one entry of `processes`; an unknown status counts as `gone`."""
    return ProcessEntry(
        name=str(entry.get("name")),
        rank=number(entry.get("rank")),
        role=str(entry.get("role") or "trainer"),
        host=text(entry.get("host")),
        pid=number(entry.get("pid")),
        parent=text(entry.get("parent")),
        status=STATUSES.get(str(entry.get("status")), "gone"),
        detail=str(entry.get("detail") or ""),
        command=str(entry.get("command") or ""),
    )


def facts_from(data: bytes) -> ProcessFacts:
    """Parse proc/K/NAME.json; values of a wrong type are unknown. Raises `UnreadableDump`."""
    document = object_from(data, "a proc file")
    facts = ProcessFacts(**{name: parse(document.get(name)) for name, parse in FACTS.items()})
    # Kernels and sandboxes that hide the symbol print 0.
    return replace(facts, wchan=None) if facts.wchan in ("0", "") else facts


def gpus_from(data: bytes, host: str, sample: int) -> tuple[GpuFacts, ...]:
    """Parse gpu/K/HOST.json. Raises `UnreadableDump`."""
    document = decoded(data, "gpu")
    if not isinstance(document, list) or not all(isinstance(gpu, dict) for gpu in document):
        raise UnreadableDump("a gpu file is an array of objects")
    return tuple(
        GpuFacts(host, number(gpu.get("index")) or 0, sample, real(gpu.get("utilization_percent")))
        for gpu in document
    )


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


FACTS: dict[str, Any] = dict.fromkeys(("state", "wchan", "backend"), text) | dict.fromkeys(
    ("cpu_s", "start_time"), real
)
FACTS |= dict.fromkeys(("parent_pid", "voluntary_switches", "involuntary_switches"), number)


@dataclass(frozen=True, slots=True)
class ProcessName:
    """The process of a dump. `name` is canonical; `rank` is None for children and names without a
    rank.
    """

    name: str
    rank: int | None
    role: str = "trainer"
    host: str | None = None
    parent: str | None = None


@lru_cache(maxsize=1 << 18)  # each process has a file a sample, of two kinds
def parse_name(file_name: str) -> ProcessName:
    """Return the process that a file name stands for; never raises, an unknown name is a process
    without a rank.
    """
    if plain := PLAIN.fullmatch(file_name):
        rank = int(plain[1])
        return ProcessName(canonical("trainer", rank), rank)
    stem = stem_of(file_name)
    match = RANKED.match(stem)
    if match is None:
        bare = BARE.match(stem)
        if bare is None:
            return ProcessName(stem, None, role_in(stem))
        return ProcessName(canonical("trainer", int(bare["rank"])), int(bare["rank"]))
    rank, before = int(match["rank"]), match["before"].strip("_-. ")
    role = role_in(before)
    host = before if role == "trainer" and not COLLECTORS.fullmatch(before) else None
    name = canonical(role, rank)
    if match["child"]:
        return ProcessName(f"{name}_child_{int(match['child'])}", None, "child", host, parent=name)
    return ProcessName(name, rank, role, host)


def coordinates_in(command: str) -> tuple[int, ...] | None:
    """Return the position of a process in its job by its command line, as numbers that sort like
    ranks, or None without one.
    """
    if match := LOCAL_RANK.search(command):
        return (int(match[1]),)
    found = dict(COORDINATE.findall(command)) if "::" in command else {}
    return tuple(int(found.get(name, 0)) for name in ("DP", "PP", "TP", "EP")) if found else None


def stem_of(file_name: str) -> str:
    stem = file_name.replace("\\", "/").rsplit("/", 1)[-1]
    while stem.lower().endswith(ENDINGS + SUFFIXES):
        stem = stem.rsplit(".", 1)[0]
    return stem


def canonical(role: str, rank: int) -> str:
    """Return the name of a rank: `rank_3`, or `engine_rank_3` for another role."""
    return f"rank_{rank}" if role == "trainer" else f"{role}_rank_{rank}"


def role_in(text: str) -> str:
    """Return the role that a word of the text names; `trainer` without one."""
    words = re.split(r"[_\-. ]+", text.lower())
    return next((ROLES[word] for word in reversed(words) if word in ROLES), "trainer")
