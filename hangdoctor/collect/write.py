"""Write the folder that COLLECTION.md describes, pack it, and merge the folders of many hosts."""

import io
import json
import re
import tarfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from areal_core.safety.file_names import checked_name
from areal_core.safety.received import read_received
from hangdoctor.model import Status

FORMAT = "hangdoctor-collection"
VERSION = 1
MAX_MEMBER_BYTES = 256 << 20
OTHER_HOSTS = "other hosts"


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One line of `processes` in collection.json."""

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
class HostEntry:
    """One host: `status` is ok, unreachable, not_permitted or timed_out."""

    host: str
    status: str = "ok"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """collection.json. Times are seconds since the epoch.

    `elsewhere` are ranks of hosts that were not collected: they are not expected here, since a
    reader treats a rank that is expected and not found as dead. `num_masked` counts the credentials
    that were replaced by `***` in all files.
    """

    created: float
    job_size: int | None
    elsewhere: tuple[int, ...]
    hosts: tuple[HostEntry, ...]
    sample_times: tuple[float, ...]
    processes: tuple[ProcessEntry, ...]
    num_masked: int


def gone_rank(rank: int, host: str, detail: str) -> ProcessEntry:
    return ProcessEntry(f"rank_{rank}", rank, "trainer", host, None, None, "gone", detail, "")


def write_json(path: Path, value: object) -> None:
    """Write one JSON file; create the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write one text file; create the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, errors="replace")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write collection.json; it comes last, as the mark that the folder is complete."""
    write_json(
        folder / "collection.json",
        {
            "format": FORMAT,
            "version": VERSION,
            "created": manifest.created,
            "world_size": None if manifest.elsewhere else manifest.job_size,
            "job_size": manifest.job_size,
            "elsewhere": list(manifest.elsewhere),
            "masked": manifest.num_masked,
            "hosts": [asdict(host) for host in (*manifest.hosts, *_other_hosts(manifest))],
            "samples": [{"time": time} for time in manifest.sample_times],
            "processes": [asdict(process) for process in manifest.processes],
        },
    )


def _other_hosts(manifest: Manifest) -> list[HostEntry]:
    if not manifest.elsewhere:
        return []
    first, last, number = manifest.elsewhere[0], manifest.elsewhere[-1], len(manifest.elsewhere)
    return [
        HostEntry(OTHER_HOSTS, "unreachable", f"{number} ranks from {first} to {last} were not collected")
    ]


def read_manifest(folder: Path) -> Manifest:
    """Read what `write_manifest` wrote."""
    raw = json.loads(read_received(folder / "collection.json"))
    return Manifest(
        raw["created"],
        raw["job_size"],
        tuple(raw["elsewhere"]),
        tuple(HostEntry(**host) for host in raw["hosts"] if host["host"] != OTHER_HOSTS),
        tuple(sample["time"] for sample in raw["samples"]),
        tuple(ProcessEntry(**process) for process in raw["processes"]),
        raw["masked"],
    )


def pack(folder: Path) -> bytes:
    """Return the folder as a gzipped tar of relative members."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                tar.add(path, arcname=str(path.relative_to(folder)))
    return packed.getvalue()


def unpack(packed: bytes, folder: Path) -> None:
    """Write the members of a tar from another host into `folder`: regular files of relative names
    only.

    Raises:
        ValueError: these bytes are no tar, or a member points outside the folder or is too large.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
            for member in tar:
                name = checked_name(member.name, "the response")
                if not member.isfile() or member.size > MAX_MEMBER_BYTES:
                    raise ValueError(f"member {member.name!r} of the response is not a plain file inside it")
                content = tar.extractfile(member)
                assert content is not None
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"the response is no tar ({error}); it begins with {packed[:60]!r}") from error


def merge(parts: Iterable[Path], failed: Iterable[HostEntry], folder: Path, all_queried: bool) -> Manifest:
    """Merge collections of single hosts into one and write its manifest.

    A process whose name another host already uses gets the next free number of its role. A rank
    that no host has is gone when every host of the job was queried (`all_queried`) and responded,
    else it may be elsewhere.
    """
    manifests: list[Manifest] = []
    taken: dict[str, ProcessEntry] = {}
    gone: dict[str, ProcessEntry] = {}
    for part in parts:
        manifest = read_manifest(part)
        manifests.append(manifest)
        new_names: dict[str, str] = {}
        for process in manifest.processes:
            if process.pid is None:
                gone.setdefault(process.name, process)
                continue
            renamed = _rename(process, taken, new_names)
            new_names[process.name] = renamed.name
            taken[renamed.name] = renamed
        _move_members(part, folder, new_names)
    hosts = (*(host for manifest in manifests for host in manifest.hosts), *failed)
    job_size = max((manifest.job_size or 0 for manifest in manifests), default=0)
    gone = {name: process for name, process in gone.items() if name not in taken}
    known = taken.keys() | gone.keys()
    unseen = [rank for rank in range(job_size) if f"rank_{rank}" not in known]
    if all_queried and all(host.status == "ok" for host in hosts):
        found_nowhere = [
            gone_rank(rank, "", "no process on any host of the job claims it") for rank in unseen
        ]
        gone, unseen = gone | {process.name: process for process in found_nowhere}, []
    merged = Manifest(
        created=min((manifest.created for manifest in manifests), default=0.0),
        job_size=job_size or None,
        elsewhere=tuple(unseen),
        hosts=hosts,
        sample_times=manifests[0].sample_times if manifests else (),
        processes=(*taken.values(), *gone.values()),
        num_masked=sum(manifest.num_masked for manifest in manifests),
    )
    write_manifest(folder, merged)
    return merged


def _rename(process: ProcessEntry, taken: dict[str, ProcessEntry], new_names: dict[str, str]) -> ProcessEntry:
    parent, name = process.parent, process.name
    if parent is not None:
        name = new_names[parent] + name.removeprefix(parent)
        parent = new_names[parent]
    if name not in taken:
        return replace(process, name=name, parent=parent)
    stem = re.sub(r"_\d+$", "", name)
    free = 1
    while f"{stem}_{free}" in taken:
        free += 1
    return replace(process, name=f"{stem}_{free}", parent=parent, rank=None if process.rank is None else free)


def _move_members(part: Path, folder: Path, new_names: dict[str, str]) -> None:
    for path in sorted(part.rglob("*")):
        if not path.is_file() or path.name == "collection.json":
            continue
        name, dot, ending = path.name.partition(".")
        renamed = new_names.get(name, name) + dot + ending
        target = folder / path.relative_to(part).with_name(renamed)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
