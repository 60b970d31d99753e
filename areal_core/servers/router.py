"""Which server gets a request: constant time, whatever the number of servers.

Prompts are distributed round-robin; of the next server and a random one, the one with fewer running
requests is taken ("power of two choices": Mitzenmacher, IEEE TPDS 12(10), 2001). The samples of a
prompt and the turns of a conversation stay on one server, whose prefix cache serves them all. A
server with far more running requests than a random one loses this affinity: a group of 64 still
spreads over two servers.
"""

import random
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from areal_core.servers.server import Server

REMEMBERED_PROMPTS = 65536  # whose server the router knows
# A server is overloaded above two times the requests of a random one, and this many.
SPARE_REQUESTS = 8


class Router:
    """The usable servers and their running requests, for one event loop.

    Any thread may assign `servers`.
    """

    def __init__(self, servers: Sequence[Server]) -> None:
        self._turn = 0
        self._random = random.Random(0)
        self._running: defaultdict[Server, int] = defaultdict(int)
        self._homes: OrderedDict[Hashable, Server] = OrderedDict()
        self.servers = servers

    @property
    def servers(self) -> Sequence[Server]:
        """The servers that get requests."""
        return self._usable[0]

    @servers.setter
    def servers(self, servers: Sequence[Server]) -> None:
        self._usable = (tuple(servers), frozenset(servers))  # one assignment: seen as a whole

    def choose(self, prompt: Hashable, avoid: Server | None = None) -> Server | None:
        """Return a server, not `avoid` while there is another; None when there is none."""
        servers, known = self._usable
        if not servers:
            return None
        home = self._homes.get(prompt)
        other = self._other_than(home, servers)
        if home is None or home not in known or home == avoid:
            home = self._less_busy(self._next(servers, avoid), other, avoid)
        elif self._running[home] > 2 * self._running[other] + SPARE_REQUESTS and other != avoid:
            home = other
        self._homes[prompt] = home
        self._homes.move_to_end(prompt)
        if len(self._homes) > REMEMBERED_PROMPTS:
            self._homes.popitem(last=False)
        return home

    def _other_than(self, home: Server | None, servers: Sequence[Server]) -> Server:
        place = self._random.randrange(len(servers))
        return servers[place] if servers[place] != home else servers[(place + 1) % len(servers)]

    def _next(self, servers: Sequence[Server], avoid: Server | None) -> Server:
        """Return the server whose turn it is."""
        for _ in range(2):  # at most one is avoided
            server = servers[self._turn % len(servers)]
            self._turn += 1
            if server != avoid:
                break
        return server

    def _less_busy(self, server: Server, other: Server, avoid: Server | None) -> Server:
        return other if other != avoid and self._running[other] < self._running[server] else server

    @contextmanager
    def request_to(self, server: Server) -> Iterator[None]:
        """Count a request while it runs."""
        self._running[server] += 1
        try:
            yield
        finally:
            self._running[server] -= 1
