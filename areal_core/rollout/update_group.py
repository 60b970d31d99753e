"""The process group over which rank 0 sends weights to inference servers.

Rank 0 of the trainer is rank 0 of the group; server i holds the next `ranks_per_server` ranks. Both sides must enter each
collective at the same time, so the HTTP request that makes a server enter it runs in a thread while this side waits in it.
"""

import socket
import threading
import time
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

from areal_core.rollout.server_pool import ServerPool

GROUP_NAME = "update_weight_group"


class UpdateGroup:
    """Rank 0's end of the group. Raises `RequestRefused` or `ServerDied` when a server does not join."""

    def __init__(self, pool: ServerPool, backend: str, ranks_per_server: int, timeout_s: float) -> None:
        self.pool = pool
        self.servers = list(pool.servers)
        self.name = f"{GROUP_NAME}_{time.monotonic_ns()}"  # a name that a server has seen before is refused
        host = own_address(self.servers[0].address)
        world_size = 1 + len(self.servers) * ranks_per_server
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False, timeout=timeout)
        joining = pool.start_post(
            "/init_weights_update_group",
            lambda i: {
                "master_address": host,
                "master_port": store.port,
                "rank_offset": 1 + i * ranks_per_server,
                "world_size": world_size,
                "backend": backend,
                "group_name": self.name,
            },
        )
        self._group: dist.ProcessGroup | None = self._form(world_size, backend, store, timeout, joining)
        wait(joining)
        try:
            pool.raise_failures(joining)
        except RuntimeError:
            self.close()
            raise

    def _form(
        self,
        world_size: int,
        backend: str,
        store: dist.TCPStore,
        timeout: timedelta,
        joining: list[Future[str]],
    ) -> dist.ProcessGroup:
        """Waits for the servers in a thread: they never come when one has refused, and the reason is known at once."""
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

    def broadcast(self, bucket: list[tuple[str, Tensor]], extra: dict[str, Any]) -> None:
        """Sends the tensors, in order, to every server, which loads them under their names.

        Raises:
            RuntimeError: `ServerDied`, `RequestRefused` or one of the backend: the death of one server shows in many ways, the refusal of
                another that waited for it among them. What servers hold is then a mixture, and the group is of no more use.
        """
        request = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self.name,
            **extra,
        }
        replies = self.pool.start_post("/update_weights_from_distributed", lambda i: request)
        works = [
            dist.broadcast(tensor.detach().contiguous(), src=0, group=self._group, async_op=True)
            for _, tensor in bucket
        ]
        try:
            # A server that has refused or died never enters the broadcast, so waiting in it alone would not end.
            while not all(work.is_completed() for work in works):
                self.pool.raise_failures(replies)
                time.sleep(0.001)
            while works:
                works.pop().wait()
            wait(replies)
            self.pool.raise_failures(replies)
        finally:
            works.clear()  # a traceback would keep them, they the group, and the group its connections

    def close(self) -> None:
        """Leaves the group: servers that wait in it get an error once nothing refers to it here."""
        dist.destroy_process_group(self._group)
        self._group = None


def form_group(
    store: dist.TCPStore, rank: int, world_size: int, backend: str, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """A group outside the default one, of which this process is `rank`. Raises `RuntimeError` when the others do not come."""
    # Private, but the only way to a group of processes that have no default group in common; SGLang's end is made so too.
    group, _ = _new_process_group_helper(
        world_size, rank, [], dist.Backend(backend), PrefixStore(name, store), name, timeout=timeout
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def own_address(peer: str) -> str:
    """The address by which `peer` (`host:port`) sees this machine."""
    host, _, port = peer.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        return connection.getsockname()[0]
