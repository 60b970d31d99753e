"""The inference servers of a run: configured ones, and elastic ones found in a name service.

The name service is a tree of small texts, in a folder that all machines share.

    {root}/{user}/{experiment}/{trial}/gen_servers/{id}/ENTRY        "host:port" of one inference server

An entry appears and changes by one rename, so a reader sees the old text, the new one, or none. An
entry does not imply that the server is alive: only a request to the server shows that.
"""

import getpass
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from areal_core.environment import ADDRESSES_VARIABLE
from areal_core.rollout.errors import BadName, NoServers, NoSuchName
from areal_core.safety.private import check_owner, make_private, read_owned
from areal_core.servers.server import Server, is_healthy, servers_from_environment, wait_until_healthy

ENTRY = "ENTRY"  # file name of an entry's text
ATTEMPTS = 1000  # to write an entry into a folder that others delete while it is empty
logger = logging.getLogger(__name__)


class FolderNames:
    """A tree of texts in a folder, for processes of one user that share a file system.

    Names are components joined by slashes: `user/experiment/trial/key`.

    The first component of a name is a folder that only its user can write: entries that somebody
    else has planted there, with addresses of other servers, raise `ForeignOwner`.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def add(self, name: str, value: str) -> None:
        """Add an entry, or replace it. Raises `BadName`: the name is invalid."""
        folder = self.root.joinpath(*parts_of(name))
        new = folder / f".{uuid.uuid4().hex}"
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                make_private(self.root / folder.relative_to(self.root).parts[0])
                folder.mkdir(parents=True, exist_ok=True)
                new.write_text(value)
                break
            except (FileNotFoundError, FileExistsError):
                if not attempts_left:
                    raise
        os.replace(new, folder / ENTRY)

    def get(self, name: str) -> str:
        """Return the text of an entry. Raises `NoSuchName`."""
        parts = parts_of(name)
        try:
            check_owner(self.root / parts[0])
            return read_owned(self.root.joinpath(*parts, ENTRY))
        except FileNotFoundError as error:
            raise NoSuchName(f"there is no {name} under {self.root}") from error

    def delete(self, name: str) -> None:
        """Delete an entry. Raises `NoSuchName`."""
        folder = self.root.joinpath(*parts_of(name))
        try:
            (folder / ENTRY).unlink()
        except FileNotFoundError as error:
            raise NoSuchName(f"there is no {name} under {self.root}") from error
        while folder != self.root:
            try:
                folder.rmdir()
            except OSError:  # it contains other entries, or another process was faster
                return
            folder = folder.parent

    def below(self, name: str) -> dict[str, str]:
        """Return all entries below a name, by their full names, sorted."""
        found = {}
        with suppress(FileNotFoundError):
            check_owner(self.root / parts_of(name)[0])
        for file in sorted(self.root.joinpath(*parts_of(name)).rglob(ENTRY)):
            entry = file.parent.relative_to(self.root).as_posix()
            try:
                found[entry] = self.get(entry)
            except NoSuchName:  # deleted since it was listed
                continue
        return found


def parts_of(name: str) -> list[str]:
    """Split a name into components. Raises `BadName` if it is not a path below the root."""
    parts = name.split("/")
    if any(part in ("", ".", "..", ENTRY) for part in parts):
        raise BadName(
            f"the name {name!r} is invalid: expected components joined by single slashes, "
            "such as user/experiment/trial"
        )
    return parts


def servers_name(experiment: str, trial: str) -> str:
    return f"{getpass.getuser()}/{experiment}/{trial}/gen_servers"


def register_server(names: FolderNames, experiment: str, trial: str, address: str) -> str:
    """Register a server (`host:port`) for a run, running or not; return its entry's name."""
    name = f"{servers_name(experiment, trial)}/{uuid.uuid4().hex}"
    names.add(name, address)
    return name


def discovered_servers(names: FolderNames, experiment: str, trial: str) -> Mapping[str, Server]:
    return {
        name: Server(value.strip()) for name, value in names.below(servers_name(experiment, trial)).items()
    }


@dataclass(frozen=True)
class Discovery:
    """The known servers of a run; queried again whenever the set may have changed.

    Args:
        configured: servers by explicit address or from the environment; never forgotten, since one
            may be restarted.
        names: the name service in which servers register; None for a fixed set.
        experiment, trial: the run whose servers are looked up in `names`.
    """

    configured: tuple[Server, ...]
    names: FolderNames | None = None
    experiment: str = ""
    trial: str = ""

    @property
    def is_elastic(self) -> bool:
        """True if servers may join during the run."""
        return self.names is not None

    def servers(self) -> list[Server]:
        """Return every known server, alive or not, each address once."""
        found = {server.address: server for server in self._discovered().values()}
        return list((found | {server.address: server for server in self.configured}).values())

    def forget(self, server: Server) -> None:
        """Delete the entries of a dead server, so that no process contacts it again."""
        for name, discovered in self._discovered().items():
            if discovered.address == server.address and self.names is not None:
                with suppress(NoSuchName):  # another process was faster
                    self.names.delete(name)

    def _discovered(self) -> Mapping[str, Server]:
        return discovered_servers(self.names, self.experiment, self.trial) if self.names is not None else {}


def discover(
    addresses: Sequence[str],
    environ: Mapping[str, str],
    names: FolderNames,
    experiment: str,
    trial: str,
) -> Discovery:
    """Return a `Discovery` of the explicit addresses (`host:port`), or those of the environment.

    The environment variable `AREAL_LLM_SERVER_ADDRS` is read if `addresses` is empty. Servers
    registered in `names` are added in both cases.

    Raises:
        NoServers: none of the three sources names a server.
    """
    configured = [Server(address) for address in addresses]
    if not configured and environ.get(ADDRESSES_VARIABLE):
        configured = servers_from_environment(environ)
    found = Discovery(tuple(configured), names, experiment, trial)
    if not found.servers():
        raise NoServers(
            f"no inference server is known: {ADDRESSES_VARIABLE} is not set and none is registered below "
            f"{servers_name(experiment, trial)}; start the run with the launcher, or a server with areal-debug serve"
        )
    return found


def wait_until_ready(discovery: Discovery, timeout_s: float) -> list[Server]:
    """Wait for all configured servers; return them and the discovered servers that are alive.

    Raises:
        ServerDied: a configured server is not ready in time.
        NoServers: no server is configured, and no discovered one answers.
    """
    if silent := [server.address for server in discovery.configured if not is_healthy(server)]:
        logger.warning(
            "waiting up to %.0f s for inference servers that do not answer yet: %s",
            timeout_s,
            ", ".join(silent),
        )
        wait_until_healthy(list(discovery.configured), timeout_s)
    ready = [server for server in discovery.servers() if server in discovery.configured or is_healthy(server)]
    if not ready:
        addresses = ", ".join(server.address for server in discovery.servers())
        raise NoServers(
            f"none of the discovered inference servers answers ({addresses}): start one with areal-debug serve"
        )
    return ready
