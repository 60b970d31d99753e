"""The pool of a run's servers on rank 0: blocking, concurrent calls; elastic membership.

A server that stops answering is dropped with a warning; the others continue, and only the loss of
the last one is an error. Servers discovered since, and dropped ones that answer again, are added by
`refresh`, which the weight updates call first: so such a server is paused, updated and resumed with
the others before any client requests a token from it.

A server that is slow to answer a call may be loading weights, or hung. While a call is pending a
thread sends it a query that takes no time; a server that does not answer these queries either is
hung, and its call is aborted.
"""

import http.client
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from areal_core.rollout.errors import RequestRefused, ServerDied
from areal_core.servers.discovery import Discovery
from areal_core.servers.health import MAX_MISSES
from areal_core.servers.identity import RunModel, ServerIdentity
from areal_core.servers.server import Server, call, call_on, is_reachable
from areal_core.servers.wire import (
    AGAIN_TIMEOUT_S,
    ASK_TIMEOUT_S,
    Call,
    Wire,
    ask_version,
    is_alive,
    rejection_reason,
    weight_version,
)

MAX_THREADS = 64
CONNECT_S = 3.0
DYING_S = 1.0
REFUSING_S = 1.0
RESUME_RETRIES, RESUME_DELAY_S = 3, 0.2
WATCH_EVERY_S = 2.0
logger = logging.getLogger(__name__)


@dataclass
class PendingCall:
    """A call that runs on a thread, and its connection."""

    server: Server
    connection: http.client.HTTPConnection
    hung: str = ""  # the reason why it was aborted
    future: Future[str] = field(default_factory=Future)

    def abort(self, reason: str) -> None:
        """End the call with an OSError."""
        self.hung = reason
        with suppress(AttributeError, OSError):  # it has just ended, so the socket is None or closed
            self.connection.sock.shutdown(socket.SHUT_RDWR)


class ServerPool:
    """Blocking calls to every server at once, one thread each.

    Args:
        servers: the initial servers, which are alive.
        wire: the servers' routes.
        timeout_s: maximum seconds for one call.
        discovery: finds further servers; by default the set is fixed.
        model: the model that a new server must serve; None accepts any.
        pause_mode: treatment of requests in flight during a pause: "abort", "retract" or
            "in_place".
        watch_every_s: seconds between two queries of a server that has not answered a call.
        ask_timeout_s: seconds in which such a query is answered.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        wire: Wire,
        timeout_s: float = 600.0,
        *,
        discovery: Discovery | None = None,
        model: RunModel | None = None,
        pause_mode: str = "abort",
        watch_every_s: float = WATCH_EVERY_S,
        ask_timeout_s: float = ASK_TIMEOUT_S,
    ) -> None:
        self.servers = list(servers)
        self.versions: dict[Server, str | None] = {}  # of the weights, at the last refresh
        self.wire = wire
        self.timeout_s = timeout_s
        self.ask_timeout_s = ask_timeout_s
        self.pause_mode = pause_mode
        self._discovery = discovery or Discovery(tuple(servers))
        self._model = model
        self._refused: set[Server] = set()
        self._watch_every_s = watch_every_s
        self._hung: set[Server] = set()  # since the last refresh
        self._left_out: set[Server] = set()  # of this weight update: they refused a call of it
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="server-call")
        self._queries = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="server-query")

    def start_post(self, call_of: Callable[[int], Call]) -> list[PendingCall]:
        pending = []
        for i, server in enumerate(self.servers):
            wanted = call_of(i)
            started = PendingCall(server, http.client.HTTPConnection(server.address, timeout=self.timeout_s))
            started.future = self._threads.submit(
                call_on, started.connection, "POST", wanted.path, wanted.payload
            )
            pending.append(started)
        threading.Thread(target=self._watch, args=(pending,), name="watch-servers", daemon=True).start()
        return pending

    def _watch(self, calls: list[PendingCall]) -> None:
        """Abort the calls whose servers do not answer short queries either."""
        misses: Counter[Server] = Counter()
        while pending := [started for started in calls if not started.future.done()]:
            is_missing = any(misses.values())
            wait([started.future for started in pending], 0.0 if is_missing else self._watch_every_s)
            slow = [started for started in pending if not started.future.done()]
            servers = [started.server for started in slow]
            ask = partial(is_alive, wire=self.wire, timeout_s=self.ask_timeout_s)
            for started, answers in zip(slow, self._queries.map(ask, servers), strict=True):
                misses[started.server] = 0 if answers else misses[started.server] + 1
                if misses[started.server] >= MAX_MISSES:
                    self._hung.add(started.server)
                    started.abort(f"hung: {MAX_MISSES} queries without an answer")

    def raise_failures(self, calls: list[PendingCall], *, leaves_out: bool = True) -> None:
        """Raise the failure of the first server whose reply has arrived and is one.

        Args:
            leaves_out: drop a server that alone refuses; then `ServerDied` is raised.
        """
        for started in calls:
            error = started.future.exception() if started.future.done() else None
            if isinstance(error, OSError):
                raise ServerDied(
                    f"no answer ({started.hung or repr(error)}) from server {started.server.describe()}"
                ) from error
            if error is not None:
                wait([other.future for other in calls], REFUSING_S)  # do the others refuse it, too?
                if leaves_out and self.drop_refusing(calls):
                    raise ServerDied(f"left out of the weight update: {error}") from error
                raise error

    def post(self, wanted: Call, *, needs_all: bool = False) -> dict[Server, str]:
        """Send the same call to every server; return the bodies of all replies.

        Servers that do not answer, or alone answer with an error, are dropped.

        Args:
            needs_all: one server's error is an error, and drops none.

        Raises:
            RequestRefused: every server that answers does so with an error.
            ServerDied: none is left.
        """
        calls = self.start_post(lambda i: wanted)
        wait([started.future for started in calls])
        for started in calls:
            error = started.future.exception()
            if isinstance(error, OSError):
                self.drop(started.server, f"no answer to {wanted.path}: {started.hung or repr(error)}")
        if not needs_all:
            self.drop_refusing(calls)
        return {
            started.server: started.future.result() for started in calls if started.server in self.servers
        }

    def drop_refusing(self, calls: Sequence[PendingCall]) -> bool:
        """Drop the servers that refused a call which others did not; return whether there was one.

        They are left out until the next weight update.
        """
        errors = {
            started.server: started.future.exception()
            for started in calls
            if started.server in self.servers and started.future.done()
        }
        refusing = {server: error for server, error in errors.items() if isinstance(error, RequestRefused)}
        if len(refusing) in (0, len(self.servers)):
            return False
        for server, error in refusing.items():
            self._left_out.add(server)
            self.drop(server, str(error))
        return True

    def drop(self, server: Server, reason: str) -> None:
        """Continue without a server. Raises `ServerDied` if it was the last."""
        left = [other for other in self.servers if other != server]
        if not left:
            raise ServerDied(f"{reason}: the last server, {server.describe()}")
        self.servers = left
        logger.warning("weight updates leave out %s (%s); %d servers left", server.address, reason, len(left))

    def refresh(self, *, is_again: bool = False) -> None:
        """Drop servers that do not answer and add discovered ones.

        Args:
            is_again: before another attempt at a weight update, without the servers that refused
                a call of the last one.

        Raises `ServerDied` when none is left.
        """
        if not is_again:
            self._left_out.clear()
        known = self._discovery.servers()
        self.versions = answers = dict(zip(known, self._queries.map(self._ask_version, known), strict=True))
        for server in known:
            if answers[server] is None and not is_reachable(server, CONNECT_S):
                self._discovery.forget(server)
            elif answers[server] is not None and server not in (*self.servers, *self._left_out):
                self._add(server)
        for server in [server for server in self.servers if answers.get(server) is None]:
            self.drop(server, "it does not answer" if server in answers else "it is not registered")
        self._hung.clear()

    def _ask_version(self, server: Server) -> str | None:
        """Query the version; a server that has not answered before has less time."""
        is_silent = server in self._hung or server not in self.servers
        return ask_version(server, self.wire, AGAIN_TIMEOUT_S if is_silent else self.ask_timeout_s)

    def has_lost_one(self) -> bool:
        """Return whether a server hung, refused a call, or refuses connections within a second.

        A process that was killed closes its sockets one by one.
        """
        deadline = time.monotonic() + DYING_S
        while not (self._hung or self._left_out) and all(
            is_reachable(server, CONNECT_S) for server in self.servers
        ):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _add(self, server: Server) -> None:
        """Add a server, unless it serves another model: that is a warning, no error of the run."""
        if reason := rejection_reason(server, self.wire, self._model):
            if server not in self._refused:
                logger.warning("an inference server cannot join: %s", reason)
            self._refused.add(server)
            return
        self.servers = [*self.servers, server]
        logger.warning("weight updates include %s; %d servers now", server.address, len(self.servers))

    def identity(self) -> ServerIdentity:
        """Return the identity of the first server that answers.

        Raises `ServerDied` when none is left.
        """
        while True:
            try:
                return self.wire.ask_identity(self.servers[0])
            except OSError as error:
                self.drop(self.servers[0], f"no answer ({error!r})")

    def check_model(self) -> None:
        """Raise `WrongServer` for the first server of another release or another model."""
        assert self._model is not None
        identities = self._threads.map(self.wire.ask_identity, self.servers)
        for server, identity in zip(self.servers, identities, strict=True):
            self.wire.check_identity(server, identity, self._model)

    def load_first_weights(self, version: int) -> None:
        """Reload the model's own weights on servers that another run has updated."""
        assert self._model is not None
        first = ("default", str(version))
        for server in self.servers:
            if weight_version(server, self.wire) not in first:
                logger.warning(
                    "%s holds the weights of an earlier run: loading %s", server.address, self._model.path
                )
                for load in self.wire.load_folder(self._model.path, version, flush_cache=True):
                    call(server, "POST", load.path, load.payload, self.timeout_s)

    def pause(self) -> None:
        """Pause generation, and hold new requests; the client sends aborted requests again."""
        self.post(self.wire.pause(self.pause_mode))

    def resume(self) -> None:
        """Continue generation.

        A server that has the new weights and stays paused would hold the requests that it gets, so
        one that refuses is asked again.
        """
        for _ in range(RESUME_RETRIES):
            try:
                self.post(self.wire.resume(), needs_all=True)
                return
            except RequestRefused:
                time.sleep(RESUME_DELAY_S)
        self.post(self.wire.resume())

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
        self._queries.shutdown(wait=False)
