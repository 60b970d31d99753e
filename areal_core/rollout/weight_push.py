"""New weights for the SGLang servers: through a folder, or by broadcast from rank 0.

    every rank                       rank 0 only                              each server
    -------------------------        -------------------------------------    ---------------------------
                                     pause_generation                         cuts what is in flight
    for name, tensor in weights      gathers tensors into buckets
      (full_tensor: collective)      a bucket is full: send it                loads it
                                     continue_generation (always)             goes on, cache flushed
    agree: rank 0 tells every rank how it went; a failure is raised on all of them

A rank that stopped iterating would leave the others waiting in `full_tensor`, so rank 0 keeps iterating after a failure and
raises it at the end.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from areal_core.rollout.errors import PushFailed, RequestRefused
from areal_core.rollout.servers import ServerPool
from areal_core.rollout.update_group import UpdateGroup

NamedTensors = Iterator[tuple[str, Tensor]]
MESSAGE_BYTES = 4096


class WeightPush(Protocol):
    """Brings weights to where tokens are sampled."""

    def push(self, weights: NamedTensors, version: int) -> None:
        """Pushes all `weights` as `version`. Collective: every rank calls it and iterates to the end."""
        ...

    def close(self) -> None: ...


class DiskPush:
    """Writes safetensors into `folder/v{version}` (which the servers must see), has them loaded, deletes them.

    Args:
        pool: the servers; None on ranks other than 0.
        folder: where to write.
        model_path: checkpoint folder whose `config.json` describes the weights.
        bucket_bytes: size of a file, and of what rank 0 holds in memory.
    """

    def __init__(
        self, pool: ServerPool | None, folder: Path, model_path: Path, bucket_bytes: int = 1 << 30
    ) -> None:
        self.pool = pool
        self.folder = folder
        self.model_path = model_path
        self.bucket_bytes = bucket_bytes

    def push(self, weights: NamedTensors, version: int) -> None:
        from_rank_0(weights, None if self.pool is None else lambda: self._send(weights, version))

    def _send(self, weights: NamedTensors, version: int) -> None:
        folder = self.folder / f"v{version}"
        try:
            self._write(weights, folder)
            self.pool.drop_dead()
            with self.pool.paused():
                self.pool.post(
                    "/update_weights_from_disk",
                    {"model_path": str(folder), "weight_version": str(version), "flush_cache": True},
                )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _write(self, weights: NamedTensors, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.model_path / "config.json", folder)
        for i, (bucket, _) in enumerate(bucketed(weights, self.bucket_bytes)):
            save_file(
                {name: t.detach().cpu().contiguous() for name, t in bucket},
                folder / f"model-{i:05d}.safetensors",
            )

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


class BroadcastPush:
    """Broadcasts weights from rank 0 to the servers, in a process group of their own: gloo on CPU, NCCL on GPU.

    Args:
        pool: the servers; None on ranks other than 0.
        backend: "gloo" or "nccl".
        bucket_bytes: most bytes of one request, and of what rank 0 holds beside the model.
        ranks_per_server: tensor- and pipeline-parallel ranks of one server.
        timeout_s: most seconds to wait for the group to form, or for one bucket.
    """

    def __init__(
        self,
        pool: ServerPool | None,
        backend: str,
        bucket_bytes: int = 1 << 30,
        ranks_per_server: int = 1,
        timeout_s: float = 300.0,
    ) -> None:
        self.pool = pool
        self.backend = backend
        self.bucket_bytes = bucket_bytes
        self.ranks_per_server = ranks_per_server
        self.timeout_s = timeout_s
        self._group: UpdateGroup | None = None

    def push(self, weights: NamedTensors, version: int) -> None:
        from_rank_0(weights, None if self.pool is None else lambda: self._send(weights, version))

    def _send(self, weights: NamedTensors, version: int) -> None:
        self._join()
        with self.pool.paused():
            in_session = self._begin()
            for bucket, is_last in bucketed(weights, self.bucket_bytes):
                # The version and the flush come with the last bucket: before it the server holds a mixture.
                last = {"weight_version": str(version), "flush_cache": True}
                self._group.broadcast(bucket, last if is_last else {"flush_cache": False})
            if in_session:
                self.pool.post("/end_weight_update", {})

    def _join(self) -> None:
        """Forms the group with the servers that are alive; again when one has died."""
        self.pool.drop_dead()
        if self._group is None or self._group.servers != self.pool.servers:
            self._group = UpdateGroup(self.pool, self.backend, self.ranks_per_server, self.timeout_s)

    def _begin(self) -> bool:
        """Opens the server's update session. False for older servers, which have no such route."""
        try:
            self.pool.post("/begin_weight_update", {})
        except RequestRefused as refused:
            if refused.status != 404:
                raise
            return False
        return True

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        if self.pool is not None:
            self.pool.close()


def bucketed(weights: NamedTensors, bucket_bytes: int) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Groups of tensors of at most `bucket_bytes` (or one larger tensor), each with whether it is the last."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket, False
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket, True


def from_rank_0(weights: NamedTensors, send: Callable[[], None] | None) -> None:
    """Runs `send`, which rank 0 passes, while the other ranks iterate. Raises `PushFailed` on every rank. Collective."""
    failure = None
    if send is not None:
        try:
            send()
        except Exception as error:  # of any kind: it must reach the other ranks, which wait for this one
            failure = error
    for _ in (
        weights
    ):  # what rank 0 has left after a failure, and all of it elsewhere: the others are in each full_tensor
        pass
    said = broadcast_text("" if failure is None else f"{type(failure).__name__}: {failure}")
    if said:
        raise PushFailed(f"the weights did not reach the servers: {said}") from failure


def broadcast_text(text: str) -> str:
    """Rank 0's text, on every rank. Collective."""
    if not dist.is_initialized():
        return text
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    padded = text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    message = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    dist.broadcast(message, src=0)
    return bytes(message.tolist()).rstrip(b"\0").decode(errors="replace")
