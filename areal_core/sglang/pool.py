"""The pool of a run's servers on rank 0: blocking, concurrent calls; elastic membership.

A server that stops answering is dropped with a warning; the others continue, and only the loss of
the last one is an error. Servers discovered since are added by `refresh`, which the weight updates
call first: so a new server is paused, updated and resumed with the others before any client
requests a token from it.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from areal_core.rollout.errors import RequestRefused, ServerDied
from areal_core.sglang.discovery import Discovery
from areal_core.sglang.server import (
    RunModel,
    Server,
    ServerIdentity,
    ask_identity,
    call,
    check_identity,
    is_reachable,
    rejection_reason,
    weight_version,
)

MAX_THREADS = 64
CONNECT_S = 3.0
DYING_S = 1.0
logger = logging.getLogger(__name__)


class ServerPool:
    """Blocking calls to every server at once, one thread each.

    Args:
        servers: the initial servers, which are alive.
        timeout_s: maximum seconds for one call.
        discovery: finds further servers; by default the set is fixed.
        model: the model that a new server must serve; None accepts any.
        pause_mode: SGLang's treatment of requests in flight during a pause: "abort", "retract" or
            "in_place".
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
        """Start a POST to each server; `payload_of(i)` is the payload of server i."""
        return [
            self._threads.submit(call, server, "POST", path, payload_of(i), self.timeout_s)
            for i, server in enumerate(self.servers)
        ]

    def raise_failures(self, futures: list[Future[str]]) -> None:
        """Raise the failure of the first server whose reply has arrived and is one."""
        for server, future in zip(self.servers, futures, strict=True):
            error = future.exception() if future.done() else None
            if isinstance(error, OSError):
                raise ServerDied(f"no answer ({error!r}) from server {server.describe()}") from error
            if error is not None:
                raise error

    def post(self, path: str, payload: Any) -> dict[Server, str]:
        """POST the same payload to every server; return the bodies of all replies.

        Servers that do not answer are dropped.

        Raises:
            RequestRefused: a server answered with an error; raised after every reply has arrived.
            ServerDied: none is left.
        """
        futures = dict(zip(self.servers, self.start_post(path, lambda i: payload), strict=True))
        wait(futures.values())
        for server, future in futures.items():
            if isinstance(future.exception(), OSError):
                self.drop(server, f"no answer to {path}: {future.exception()!r}")
        return {server: futures[server].result() for server in self.servers}

    def drop(self, server: Server, reason: str) -> None:
        """Continue without a server. Raises `ServerDied` if it was the last."""
        left = [other for other in self.servers if other != server]
        if not left:
            raise ServerDied(f"{reason}: the last server, {server.describe()}")
        self.servers = left
        logger.warning("inference server lost (%s): %s; %d left", reason, server.address, len(left))

    def refresh(self) -> None:
        """Drop unreachable servers and add discovered ones.

        Raises `ServerDied` when none is left.
        """
        known = self._discovery.servers()
        answers = dict(
            zip(
                known,
                self._threads.map(partial(is_reachable, timeout_s=CONNECT_S), known),
                strict=True,
            )
        )
        for server in known:
            if not answers[server]:
                self._discovery.forget(server)
            elif server not in self.servers:
                self._add(server)
        for server in [server for server in self.servers if not answers.get(server, False)]:
            self.drop(server, "no connection" if server in answers else "unregistered")

    def has_lost_one(self) -> bool:
        """Return whether a server refuses connections now or within a second.

        A process that was killed closes its sockets one by one.
        """
        deadline = time.monotonic() + DYING_S
        while all(is_reachable(server, CONNECT_S) for server in self.servers):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _add(self, server: Server) -> None:
        """Add a server, unless it serves another model: that is a warning, no error of the run."""
        if reason := rejection_reason(server, self._model):
            if server not in self._refused:
                logger.warning("an inference server cannot join: %s", reason)
            self._refused.add(server)
            return
        self.servers = [*self.servers, server]
        logger.warning("inference server joined: %s; %d now", server.address, len(self.servers))

    def identity(self) -> ServerIdentity:
        """Return the identity of the first server that answers.

        Raises `ServerDied` when none is left.
        """
        while True:
            try:
                return ask_identity(self.servers[0])
            except OSError as error:
                self.drop(self.servers[0], f"no answer ({error!r})")

    def check_model(self) -> None:
        """Raise `WrongServer` for the first server of another SGLang release or another model."""
        assert self._model is not None
        for server, identity in zip(self.servers, self._threads.map(ask_identity, self.servers), strict=True):
            check_identity(server, identity, self._model)

    def load_first_weights(self, version: int) -> None:
        """Reload the model's own weights on servers that another run has updated."""
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
        """Pause generation, and hold new requests; the client sends aborted requests again."""
        self.post("/pause_generation", {"mode": self.pause_mode})

    def resume(self) -> None:
        """Continue generation."""
        self.post("/continue_generation", {})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause generation during the body; an exception of the body takes precedence."""
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
        """True if prefix caches can be emptied in a pause; requests paused in place keep theirs."""
        return self.pause_mode != "in_place"

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()
