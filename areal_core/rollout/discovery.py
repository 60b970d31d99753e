"""Where a run's servers are: those it was told of, and those that have announced themselves since."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from areal_core.rollout.errors import NoServers, NoSuchName
from areal_core.rollout.name_service import NameService, announced_servers, servers_name
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
    """Asked again whenever the set of servers may have changed.

    Args:
        told: servers by explicit address or from the environment; never forgotten, since one may come back.
        names: where servers announce themselves; None for a set that is fixed.
    """

    told: tuple[Server, ...]
    names: NameService | None = None
    experiment: str = ""
    trial: str = ""

    @property
    def is_elastic(self) -> bool:
        return self.names is not None

    def servers(self) -> list[Server]:
        """Every server that is known of, alive or not, each address once."""
        found = {server.address: server for server in self._announced().values()}
        return list((found | {server.address: server for server in self.told}).values())

    def forget(self, server: Server) -> None:
        """Deletes what a dead server has announced, so that nobody asks for it again."""
        for name, announced in self._announced().items():
            if announced.address == server.address and self.names is not None:
                with suppress(NoSuchName):  # another process was quicker
                    self.names.delete(name)

    def _announced(self) -> Mapping[str, Server]:
        return announced_servers(self.names, self.experiment, self.trial) if self.names is not None else {}


def discover(
    addresses: Sequence[str],
    environ: Mapping[str, str],
    names: NameService,
    experiment: str,
    trial: str,
) -> Discovery:
    """Explicit addresses (`host:port`), else those of `AREAL_LLM_SERVER_ADDRS`; and always the name service beside them.

    Raises:
        NoServers: none is known in any of the three ways.
    """
    told = [Server(address) for address in addresses]
    if not told and environ.get(ADDRESSES_VARIABLE):
        told = servers_from_environment(environ)
    found = Discovery(tuple(told), names, experiment, trial)
    if not found.servers():
        raise NoServers(
            f"no inference server is known: {ADDRESSES_VARIABLE} is not set and none has announced itself below "
            f"{servers_name(experiment, trial)}; start the run with the launcher, or a server with areal-debug serve"
        )
    return found


def wait_until_ready(discovery: Discovery, timeout_s: float) -> list[Server]:
    """The servers that answer: all that the run was told of, and those of the announced that are alive.

    Raises:
        ServerDied: one that the run was told of is not ready in time.
        NoServers: nobody told of any, and none of the announced answers.
    """
    if silent := [server.address for server in discovery.told if not is_healthy(server)]:
        logger.warning(
            "waiting up to %.0f s for inference servers that do not answer yet: %s",
            timeout_s,
            ", ".join(silent),
        )
        wait_until_healthy(list(discovery.told), timeout_s)
    ready = [server for server in discovery.servers() if server in discovery.told or is_healthy(server)]
    if not ready:
        addresses = ", ".join(server.address for server in discovery.servers())
        raise NoServers(
            f"none of the announced inference servers answers ({addresses}): start one with areal-debug serve"
        )
    return ready
