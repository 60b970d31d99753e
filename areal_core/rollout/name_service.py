"""Names under which the processes of a run find each other: a tree of small texts, in a folder that all machines see.

    {root}/{user}/{experiment}/{trial}/gen_servers/{id}/ENTRY        "host:port" of one inference server

An entry appears and changes by one rename, so a reader sees the old text, the new one, or none. Whether a server is alive is
asked of the server; an entry only says that there was one.
"""

import getpass
import os
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from areal_core.rollout.errors import BadName, NameTaken, NoSuchName
from areal_core.rollout.servers import Server

ENTRY = "ENTRY"
POLL_S = 0.1
ATTEMPTS = 1000


class NameService(Protocol):
    """A tree of texts. Names are parts with slashes between them: `user/experiment/trial/what`."""

    def add(self, name: str, value: str, *, replace: bool = False) -> None:
        """Raises `NameTaken` when there is one and `replace` is false, `BadName`."""
        ...

    def get(self, name: str) -> str:
        """Raises `NoSuchName`."""
        ...

    def delete(self, name: str) -> None:
        """Raises `NoSuchName`."""
        ...

    def below(self, name: str) -> dict[str, str]:
        """Every entry below a name, by its whole name, in order."""
        ...


class FolderNames:
    """A `NameService` in a folder, for processes on one machine or on many that share a file system."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def add(self, name: str, value: str, *, replace: bool = False) -> None:
        folder = self.root.joinpath(*parts_of(name))
        new = self._write_beside(folder, value)
        try:
            if replace:
                os.replace(new, folder / ENTRY)
            else:
                os.link(new, folder / ENTRY)  # unlike a rename it fails when there is one, on NFS as well
        except FileExistsError as error:
            raise NameTaken(f"{name} is there already, under {self.root}") from error
        finally:
            new.unlink(missing_ok=True)

    def _write_beside(self, folder: Path, value: str) -> Path:
        """A new file in `folder`, which others may be deleting while it is empty."""
        new = folder / f".{uuid.uuid4().hex}"
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                new.write_text(value)
                break
            except (FileNotFoundError, FileExistsError):
                if not attempts_left:
                    raise
        return new

    def get(self, name: str) -> str:
        try:
            return self.root.joinpath(*parts_of(name), ENTRY).read_text()
        except FileNotFoundError as error:
            raise NoSuchName(f"there is no {name} under {self.root}") from error

    def delete(self, name: str) -> None:
        folder = self.root.joinpath(*parts_of(name))
        try:
            (folder / ENTRY).unlink()
        except FileNotFoundError as error:
            raise NoSuchName(f"there is no {name} under {self.root}") from error
        while folder != self.root:
            try:
                folder.rmdir()
            except OSError:  # it holds other entries, or another process was quicker
                return
            folder = folder.parent

    def below(self, name: str) -> dict[str, str]:
        found = {}
        for file in sorted(self.root.joinpath(*parts_of(name)).rglob(ENTRY)):
            entry = file.parent.relative_to(self.root).as_posix()
            try:
                found[entry] = self.get(entry)
            except NoSuchName:  # deleted since it was listed
                continue
        return found


class MemoryNames:
    """A `NameService` inside one process."""

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: str, *, replace: bool = False) -> None:
        parts_of(name)
        with self._lock:
            if name in self._entries and not replace:
                raise NameTaken(f"{name} is there already")
            self._entries[name] = value

    def get(self, name: str) -> str:
        with self._lock:
            if name not in self._entries:
                raise NoSuchName(f"there is no {name}")
            return self._entries[name]

    def delete(self, name: str) -> None:
        self.get(name)
        with self._lock:
            self._entries.pop(name, None)

    def below(self, name: str) -> dict[str, str]:
        with self._lock:
            return {key: self._entries[key] for key in sorted(self._entries) if key.startswith(f"{name}/")}


def parts_of(name: str) -> list[str]:
    """Raises `BadName` for a name that is no path below the root."""
    parts = name.split("/")
    if any(part in ("", ".", "..", ENTRY) for part in parts):
        raise BadName(
            f"the name {name!r} is not parts with single slashes between them, such as user/experiment/trial"
        )
    return parts


def servers_name(experiment: str, trial: str) -> str:
    """The name below which a run's inference servers are."""
    return f"{getpass.getuser()}/{experiment}/{trial}/gen_servers"


def announce_server(names: NameService, experiment: str, trial: str, address: str) -> str:
    """Adds a server (`host:port`) to a run, which may be running; the name of its entry, for `delete`."""
    name = f"{servers_name(experiment, trial)}/{uuid.uuid4().hex}"
    names.add(name, address)
    return name


def announced_servers(names: NameService, experiment: str, trial: str) -> Mapping[str, Server]:
    """The servers of a run, by the name of their entry."""
    return {
        name: Server(value.strip()) for name, value in names.below(servers_name(experiment, trial)).items()
    }


def wait_for_servers(
    names: NameService, experiment: str, trial: str, count: int, timeout_s: float
) -> Mapping[str, Server]:
    """The servers of a run, once there are `count` of them. Raises `NoSuchName` when late."""
    deadline = time.monotonic() + timeout_s
    while len(servers := announced_servers(names, experiment, trial)) < count:
        if time.monotonic() > deadline:
            raise NoSuchName(
                f"{len(servers)} of {count} inference servers have announced themselves below "
                f"{servers_name(experiment, trial)} after {timeout_s:.0f} s"
            )
        time.sleep(POLL_S)
    return servers
