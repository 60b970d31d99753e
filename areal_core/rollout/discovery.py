"""The inference servers of a run: configured ones, and elastic ones that are discovered."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from areal_core.rollout.errors import NoServers, NoSuchName
from areal_core.rollout.name_service import NameService, discovered_servers, servers_name
from areal_core.rollout.servers import (
    ADDRESSES_VARIABLE,
    Server,
    is_healthy,
    servers_from_environment,
    wait_until_healthy,
)

logger = logging.getLogger(__name__)


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
    names: NameService | None = None
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
    names: NameService,
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
