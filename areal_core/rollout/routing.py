"""Routing of requests to servers: round-robin over prompts, one server per prompt.

The samples of a prompt share its prefix, and so do the turns of a conversation, so one server's
prefix cache serves them all. A server with far more running requests than the least loaded one
loses this affinity: a group of 64 still spreads over two servers.
"""

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from areal_core.rollout.servers import Server

REMEMBERED_PROMPTS = 65536
SPARE_REQUESTS = 8


class Router:
    """The usable servers and their running requests, for one event loop.

    Any thread may assign `servers`.
    """

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = list(servers)
        self._turn = itertools.count()
        self._running: defaultdict[Server, int] = defaultdict(int)
        self._homes: OrderedDict[Hashable, Server] = OrderedDict()

    def choose(self, prompt: Hashable, avoid: Server | None = None) -> Server | None:
        """Return a server, not `avoid` while there is another; None when there is none."""
        servers = self.servers
        candidates = [server for server in servers if server != avoid] or servers
        if not candidates:
            return None
        home = self._homes.get(prompt)
        if home is None or home not in candidates:
            home = candidates[next(self._turn) % len(candidates)]
        elif self._is_overloaded(home, candidates):
            home = min(candidates, key=self._running.__getitem__)
        self._homes[prompt] = home
        self._homes.move_to_end(prompt)
        if len(self._homes) > REMEMBERED_PROMPTS:
            self._homes.popitem(last=False)
        return home

    def _is_overloaded(self, server: Server, others: Sequence[Server]) -> bool:
        return self._running[server] > 2 * min(self._running[other] for other in others) + SPARE_REQUESTS

    @contextmanager
    def request_to(self, server: Server) -> Iterator[None]:
        """Count a request while it runs."""
        self._running[server] += 1
        try:
            yield
        finally:
            self._running[server] -= 1

    def drop(self, server: Server) -> None:
        """Stop using a server."""
        self.servers = [other for other in self.servers if other != server]
