"""Writing the folder that COLLECTION.md describes, packing it, and laying the folders of many hosts into one."""

import io
import json
import re
import tarfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath

FORMAT = "hangdoctor-collection"
VERSION = 1
MAX_MEMBER_BYTES = 256 << 20
ABSENT = ("gone", "not_collected")


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One line of `processes` in collection.json."""

    name: str
    rank: int | None
    role: str
    host: str
    pid: int | None
    parent: str | None
    status: str
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
    """collection.json. Times are seconds since the epoch."""

    created: float
    world_size: int | None
    hosts: tuple[HostEntry, ...]
    sample_times: tuple[float, ...]
    processes: tuple[ProcessEntry, ...]


def write_json(path: Path, value: object) -> None:
    """One JSON file; folders above it are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """One text file; folders above it are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, errors="replace")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """collection.json, written last: its presence says that the folder is whole."""
    write_json(
        folder / "collection.json",
        {
            "format": FORMAT,
            "version": VERSION,
            "created": manifest.created,
            "world_size": manifest.world_size,
            "hosts": [asdict(host) for host in manifest.hosts],
            "samples": [{"time": time} for time in manifest.sample_times],
            "processes": [asdict(process) for process in manifest.processes],
        },
    )


def read_manifest(folder: Path) -> Manifest:
    """What `write_manifest` wrote."""
    raw = json.loads((folder / "collection.json").read_text())
    return Manifest(
        raw["created"],
        raw["world_size"],
        tuple(HostEntry(**host) for host in raw["hosts"]),
        tuple(sample["time"] for sample in raw["samples"]),
        tuple(ProcessEntry(**process) for process in raw["processes"]),
    )


def pack(folder: Path) -> bytes:
    """The folder as a gzipped tar of relative members."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                tar.add(path, arcname=str(path.relative_to(folder)))
    return packed.getvalue()


def unpack(packed: bytes, folder: Path) -> None:
    """Members of a tar from another host into `folder`: regular files of relative names only.

    Raises:
        ValueError: these bytes are no tar, or a member reaches out of the folder or is absurdly large.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
            for member in tar:
                name = PurePosixPath(member.name)
                if (
                    not member.isfile()
                    or name.is_absolute()
                    or ".." in name.parts
                    or member.size > MAX_MEMBER_BYTES
                ):
                    raise ValueError(f"member {member.name!r} of the answer is not a plain file inside it")
                content = tar.extractfile(member)
                assert content is not None
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"the answer is no tar ({error}); it begins {packed[:60]!r}") from error


def merge(parts: Iterable[Path], failed: Iterable[HostEntry], folder: Path) -> Manifest:
    """Lay collections of single hosts into one and write its manifest.

    A process whose name another host has taken already gets the next free number of its role; an expected rank
    that some host found is there, whatever the others say of it.
    """
    manifests: list[Manifest] = []
    taken: dict[str, ProcessEntry] = {}
    absent: dict[str, ProcessEntry] = {}
    for part in parts:
        manifest = read_manifest(part)
        manifests.append(manifest)
        new_names: dict[str, str] = {}
        for process in manifest.processes:
            if process.status in ABSENT and process.pid is None:
                absent.setdefault(process.name, process)
                continue
            renamed = _rename(process, taken, new_names)
            new_names[process.name] = renamed.name
            taken[renamed.name] = renamed
        _move_members(part, folder, new_names)
    hosts = (*(host for manifest in manifests for host in manifest.hosts), *failed)
    merged = Manifest(
        min((m.created for m in manifests), default=0.0),
        max((m.world_size or 0 for m in manifests), default=0) or None,
        hosts,
        manifests[0].sample_times if manifests else (),
        (*taken.values(), *(_still_absent(absent, taken, hosts))),
    )
    write_manifest(folder, merged)
    return merged


def _still_absent(
    absent: dict[str, ProcessEntry], taken: dict[str, ProcessEntry], hosts: tuple[HostEntry, ...]
) -> list[ProcessEntry]:
    """Ranks that no host has. Where every host answered, nobody will bring them: they are gone."""
    unseen = [host.host for host in hosts if host.status != "ok"]
    missing = [process for name, process in absent.items() if name not in taken]
    if unseen:
        return [
            replace(process, detail=f"not found on the hosts that answered; {', '.join(unseen)} did not")
            if process.status == "not_collected"
            else process
            for process in missing
        ]
    return [
        replace(process, status="gone", detail="no process on any host that was asked claims this rank")
        for process in missing
    ]


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
