"""The servers of a run as its rank 0 commands them: blocking calls to all of them at once, while some come and some go.

A server that stops answering is dropped and told of; the others go on, and only the death of the last one is an error. Servers
that have announced themselves since are taken in by `refresh`, which the weight pushes call before they begin: so a new
server is paused, pushed to and resumed with the others before any client asks it for a token.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from areal_core.rollout.discovery import Discovery
from areal_core.rollout.errors import RequestRefused, ServerDied
from areal_core.rollout.server_identity import (
    RunModel,
    ServerIdentity,
    ask_identity,
    check_identity,
    weight_version,
    why_not,
)
from areal_core.rollout.servers import Server, call, is_reachable

MAX_THREADS = 64
CONNECT_S = 3.0
DYING_S = 1.0
logger = logging.getLogger(__name__)


class ServerPool:
    """Blocking calls to every server at once, one thread each.

    Args:
        servers: the first of them, which are alive.
        timeout_s: most seconds for one call.
        discovery: where more may appear; by default the set is fixed.
        model: what a new server must serve; None takes any.
        pause_mode: what a pause does to requests in flight: "abort", "retract" or "in_place" (SGLang's).
    """

    def __init__(
        self,
        servers: Sequence[Server],
        timeout_s: float = 600.0,
        *,
        discovery: Discovery | None = None,
        model: RunModel | None = None,
        pause_mode: str = "abort",
    ) -> None:
        self.servers = list(servers)
        self.timeout_s = timeout_s
        self.pause_mode = pause_mode
        self._discovery = discovery or Discovery(tuple(servers))
        self._model = model
        self._refused: set[Server] = set()
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="server-call")

    def start_post(self, path: str, payload_of: Callable[[int], Any]) -> list[Future[str]]:
        """Begins a POST to each server; `payload_of(i)` is the payload of server i."""
        return [
            self._threads.submit(call, server, "POST", path, payload_of(i), self.timeout_s)
            for i, server in enumerate(self.servers)
        ]

    def raise_failures(self, futures: list[Future[str]]) -> None:
        """Raises for the first server whose reply is in and is a failure."""
        for server, future in zip(self.servers, futures, strict=True):
            error = future.exception() if future.done() else None
            if isinstance(error, OSError):
                raise ServerDied(f"no answer ({error!r}) from server {server.describe()}") from error
            if error is not None:
                raise error

    def post(self, path: str, payload: Any) -> dict[Server, str]:
        """POSTs the same payload to every server and waits; the bodies of the replies. Servers that die are dropped.

        Raises:
            RequestRefused: a server said no; after every reply is in.
            ServerDied: none is left.
        """
        futures = dict(zip(self.servers, self.start_post(path, lambda i: payload), strict=True))
        wait(futures.values())
        for server, future in futures.items():
            if isinstance(future.exception(), OSError):
                self.drop(server, f"no answer to {path}: {future.exception()!r}")
        return {server: futures[server].result() for server in self.servers}

    def drop(self, server: Server, reason: str) -> None:
        """Goes on without a server. Raises `ServerDied` when it was the last."""
        left = [other for other in self.servers if other != server]
        if not left:
            raise ServerDied(f"{reason}: the last server, {server.describe()}")
        self.servers = left
        logger.warning("inference server lost (%s): %s; %d left", reason, server.address, len(left))

    def refresh(self) -> None:
        """Drops servers that refuse connections and takes in those that have come. Raises `ServerDied` when none is left."""
        announced = self._discovery.servers()
        answers = dict(
            zip(
                announced,
                self._threads.map(partial(is_reachable, timeout_s=CONNECT_S), announced),
                strict=True,
            )
        )
        for server in announced:
            if not answers[server]:
                self._discovery.forget(server)
            elif server not in self.servers:
                self._take_in(server)
        for server in [server for server in self.servers if not answers.get(server, False)]:
            self.drop(server, "no connection" if server in answers else "has left")

    def has_lost_one(self) -> bool:
        """Whether a server refuses connections, or does so soon: a process that was killed closes its sockets one by one."""
        deadline = time.monotonic() + DYING_S
        while all(is_reachable(server, CONNECT_S) for server in self.servers):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _take_in(self, server: Server) -> None:
        """A server of another model is left alone: whoever started it beside a running training made the mistake, not the run."""
        if reason := why_not(server, self._model):
            if server not in self._refused:
                logger.warning("an inference server cannot join: %s", reason)
            self._refused.add(server)
            return
        self.servers = [*self.servers, server]
        logger.warning("inference server joined: %s; %d now", server.address, len(self.servers))

    def identity(self) -> ServerIdentity:
        """What the first server that answers says of itself. Raises `ServerDied` when none is left."""
        while True:
            try:
                return ask_identity(self.servers[0])
            except OSError as error:
                self.drop(self.servers[0], f"no answer ({error!r})")

    def check_model(self) -> None:
        """Raises `WrongServer` for the first server that speaks another version or serves another model than the run's."""
        assert self._model is not None
        for server, identity in zip(self.servers, self._threads.map(ask_identity, self.servers), strict=True):
            check_identity(server, identity, self._model)

    def load_first_weights(self, version: int) -> None:
        """Makes servers that another run has pushed to load the model's own weights again, from its folder."""
        assert self._model is not None
        first = ("default", str(version))
        for server in self.servers:
            if weight_version(server) not in first:
                logger.warning(
                    "%s holds the weights of an earlier run: loading %s", server.address, self._model.path
                )
                payload = {
                    "model_path": self._model.path,
                    "weight_version": str(version),
                    "flush_cache": True,
                }
                call(server, "POST", "/update_weights_from_disk", payload, self.timeout_s)

    def pause(self) -> None:
        """Stops every request in flight, and holds new ones; what is cut, the client sends again."""
        self.post("/pause_generation", {"mode": self.pause_mode})

    def resume(self) -> None:
        self.post("/continue_generation", {})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses, and lets generation go on however the body ends; the body's failure is the one that is told."""
        try:
            self.pause()
            yield
        except BaseException:
            with suppress(ServerDied, RequestRefused):
                self.resume()
            raise
        self.resume()

    @property
    def flushes(self) -> bool:
        """Whether prefix caches can be emptied in a pause: requests that keep their place keep their cache."""
        return self.pause_mode != "in_place"

    def flush_cache(self) -> None:
        """Empties the prefix caches. Raises `RequestRefused` while requests are running."""
        self.post("/flush_cache", {})

    def close(self) -> None:
        self._threads.shutdown()
