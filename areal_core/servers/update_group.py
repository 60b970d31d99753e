"""The process group over which rank 0 of the trainer sends weights to the servers."""

import os
import socket
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it to mypy
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

from areal_core.servers.pool import PendingCall, ServerPool
from areal_core.servers.wire import LastBucket

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

GROUP_NAME = "update_weight_group"
REFUSAL_S = 2.0


class UpdateGroup:
    """Rank 0's side of the process group over which it sends weights to the servers.

    Raises `RequestRefused` or `ServerDied` if a server does not join.
    """

    def __init__(self, pool: ServerPool, backend: str, ranks_per_server: int, timeout_s: float) -> None:
        self.pool = pool
        self.servers = list(pool.servers)
        self.is_new = True  # no update yet: a server that refuses has not lost it by a restart
        self.name = f"{GROUP_NAME}_{time.monotonic_ns()}"  # servers refuse a known name
        host = own_address(self.servers[0].address)
        world_size = 1 + len(self.servers) * ranks_per_server
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False, timeout=timeout)
        joining = pool.start_post(
            lambda i: pool.wire.join_group(
                host, store.port, 1 + i * ranks_per_server, world_size, backend, self.name
            )
        )
        before = open_sockets()
        self._group: dist.ProcessGroup | None = self._form(world_size, backend, store, timeout, joining)
        wait([call.future for call in joining])
        self._sockets = open_sockets() - before
        try:
            pool.raise_failures(joining)
        except RuntimeError:
            self.close()
            raise

    def _form(
        self,
        world_size: int,
        backend: str,
        store: TCPStore,
        timeout: timedelta,
        joining: list[PendingCall],
    ) -> dist.ProcessGroup:
        """Form the group in a thread; raise the error of a server that refuses.

        The group then never forms.
        """
        formed: Future[dist.ProcessGroup] = Future()

        def form() -> None:
            try:
                formed.set_result(form_group(store, 0, world_size, backend, self.name, timeout))
            except RuntimeError as error:
                formed.set_exception(error)

        threading.Thread(target=form, name="update-group", daemon=True).start()
        while not formed.done():
            self.pool.raise_failures(joining)
            time.sleep(0.01)
        return formed.result()

    def broadcast(self, bucket: list[tuple[str, Tensor]], last: LastBucket | None) -> None:
        """Send the tensors, in order, to every server, which loads them by name.

        Raises:
            RuntimeError: `ServerDied`, `RequestRefused` or an error of the backend; the death of a
                server may also appear as the refusal of another one that waited for it. Servers
                then hold a mixture of weights, and the group is unusable.
        """
        call = self.pool.wire.receive(
            [name for name, _ in bucket],
            [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            [list(tensor.shape) for _, tensor in bucket],
            self.name,
            last,
        )
        replies = self.pool.start_post(lambda i: call)
        broadcasts = (
            dist.broadcast(tensor.detach().contiguous(), src=0, group=self._group, async_op=True)
            for _, tensor in bucket
        )
        works = [work for work in broadcasts if work is not None]  # None only outside the group
        try:
            # A server that has refused or died never enters the broadcast, so waiting only for the
            # broadcast would not end.
            while not all(work.is_completed() for work in works):
                self.pool.raise_failures(replies, leaves_out=self.is_new)
                time.sleep(0.001)
            while works:
                works.pop().wait()
            wait([reply.future for reply in replies])
            self.pool.raise_failures(replies, leaves_out=self.is_new)
        except RuntimeError:
            # A server that refuses a tensor may leave the group before its reply gives the reason.
            wait([reply.future for reply in replies], REFUSAL_S, FIRST_EXCEPTION)
            self.pool.raise_failures(replies, leaves_out=self.is_new)
            raise
        finally:
            works.clear()  # otherwise a traceback keeps them, the group and its connections alive

    def break_off(self) -> None:
        """Leave a group in which a broadcast may be pending, perhaps for a hung server.

        gloo cannot be aborted: destroying a group waits for its pending work until the time-out,
        and so do the servers that wait in it. With its connections shut down both fail at once.
        """
        servers = {server.address for server in self.servers}
        for descriptor, _ in self._sockets & open_sockets():
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                host, port, *_ = connection.getpeername()
                if f"{host.removeprefix('::ffff:')}:{port}" not in servers:  # no HTTP connection
                    connection.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Leave the group: servers that wait in it get an error once nothing refers to it here."""
        dist.destroy_process_group(self._group)
        self._group = None


def open_sockets() -> set[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since
            inode = os.readlink(f"/proc/self/fd/{name}")
            if inode.startswith("socket:"):
                found.add((int(name), inode))
    return found


def form_group(
    store: TCPStore, rank: int, world_size: int, backend: str, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Return a group outside the default one, in which this process is `rank`.

    Raises:
        RuntimeError: the other processes do not join in time.
    """
    # Private, but the only way to form a group of processes without a common default group; SGLang
    # does the same on its side.
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(backend),
        PrefixStore(name, store),
        cast("GroupName", name),
        timeout=timeout,
    )
    assert isinstance(group, dist.ProcessGroup)  # this process is a member
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def own_address(peer: str) -> str:
    """Return the address of this machine as seen by `peer` (`host:port`)."""
    host, _, port = peer.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        return connection.getsockname()[0]
