"""New weights for the SGLang servers: through a folder, or by broadcast from rank 0.

    every rank                       rank 0 only                              each server
    -------------------------        -------------------------------------    ---------------------------
                                     takes in new servers, drops dead ones
                                     pause_generation                         cuts or holds what is in flight
    for name, tensor in weights      gathers tensors into buckets
      (full_tensor: collective)      a bucket is full: send it                loads it
                                     compares checksums, when it is time      /weights_checker
                                     continue_generation                      goes on, cache flushed
    agree: rank 0 tells every rank how it went; a failure is raised on all of them

A rank that stopped iterating would leave the others waiting in `full_tensor`, so rank 0 keeps iterating after a failure and
raises it at the end. A server that dies in the middle of a broadcast breaks the group: the ranks agree to iterate once more, and the
servers that are left stay paused until they have all of the new weights.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from areal_core.rollout.errors import PushFailed, RequestRefused, ServerDied, WeightsDiffer
from areal_core.rollout.server_pool import ServerPool
from areal_core.rollout.update_group import UpdateGroup
from areal_core.rollout.weight_check import WeightCheck

NamedTensors = Iterable[tuple[str, Tensor]]
MESSAGE_BYTES = 4096
DONE, AGAIN, FAILED = "done", "again", "failed"
logger = logging.getLogger(__name__)


class WeightPush(Protocol):
    """Brings weights to where tokens are sampled."""

    def push(self, weights: NamedTensors, version: int) -> None:
        """Pushes all `weights` as `version`. Collective: every rank calls it and iterates to the end, perhaps more than once."""
        ...

    def close(self) -> None: ...


class DiskPush:
    """Writes safetensors into `folder/v{version}` (which the servers must see), has them loaded, deletes them.

    Args:
        pool: the servers; None on ranks other than 0.
        folder: where to write.
        model_path: checkpoint folder whose `config.json` describes the weights.
        bucket_bytes: size of a file, and of what rank 0 holds in memory.
        check: which pushes are compared with what the servers then hold.
        grace_s: seconds between the pause and the loading.
    """

    def __init__(
        self,
        pool: ServerPool | None,
        folder: Path,
        model_path: Path,
        bucket_bytes: int = 1 << 30,
        *,
        check: WeightCheck | None = None,
        grace_s: float = 0.0,
    ) -> None:
        self.pool = pool
        self.folder = folder
        self.model_path = model_path
        self.bucket_bytes = bucket_bytes
        self.check = check or WeightCheck(every=0)
        self.grace_s = grace_s

    def push(self, weights: NamedTensors, version: int) -> None:
        from_rank_0(weights, None if self.pool is None else lambda tensors: self._send(tensors, version))

    def _send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        folder = self.folder / f"v{version}"
        try:
            self.pool.refresh()
            self._write(self.check.watch(weights, self.pool), folder)
            with self.pool.paused():
                time.sleep(self.grace_s)
                self.pool.post(
                    "/update_weights_from_disk",
                    {
                        "model_path": str(folder),
                        "weight_version": str(version),
                        "flush_cache": self.pool.flushes,
                    },
                )
                self.check.compare(self.pool, version)
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
        check: which pushes are compared with what the servers then hold.
        grace_s: seconds between the pause and the first tensor.
    """

    def __init__(
        self,
        pool: ServerPool | None,
        backend: str,
        bucket_bytes: int = 1 << 30,
        ranks_per_server: int = 1,
        timeout_s: float = 300.0,
        *,
        check: WeightCheck | None = None,
        grace_s: float = 0.0,
    ) -> None:
        self.pool = pool
        self.backend = backend
        self.bucket_bytes = bucket_bytes
        self.ranks_per_server = ranks_per_server
        self.timeout_s = timeout_s
        self.check = check or WeightCheck(every=0)
        self.grace_s = grace_s
        self._group: UpdateGroup | None = None

    def push(self, weights: NamedTensors, version: int) -> None:
        send = None if self.pool is None else lambda tensors: self._send(tensors, version)
        while from_rank_0(weights, send) == AGAIN:
            if iter(weights) is weights:  # the same on every rank
                raise PushFailed(
                    "the push broke off, for the reason logged, and weights that are an iterator cannot be sent again"
                )

    def _send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """One attempt. Raises `SendAgain`, and leaves the servers paused, when another attempt can go better."""
        was_formed = self._group is not None
        try:
            self.pool.refresh()
            self.pool.pause()
            time.sleep(self.grace_s)
            self._broadcast(self.check.watch(weights, self.pool), version)
            self.check.compare(self.pool, version)
        except BaseException as error:
            self._leave()  # so that servers which wait in it get an error
            if self._may_go_better(error, was_formed):
                self.pool.refresh()
                raise SendAgain from error
            with suppress(ServerDied, RequestRefused):
                self.pool.resume()
            raise
        self.pool.resume()

    def _may_go_better(self, error: BaseException, was_formed: bool) -> bool:
        """After a death, without the dead; in a new group, when a server may have been started anew since this one was formed."""
        if not isinstance(error, RuntimeError) or isinstance(error, WeightsDiffer):
            return False
        return was_formed or self.pool.has_lost_one()

    def _broadcast(self, weights: NamedTensors, version: int) -> None:
        has_sessions = self._begin()
        # After the last call that goes on without a server that dies: from here on the group and the pool are the same servers.
        if self._group is None or self._group.servers != self.pool.servers:
            self._leave()
            self._group = UpdateGroup(self.pool, self.backend, self.ranks_per_server, self.timeout_s)
        for bucket, is_last in bucketed(weights, self.bucket_bytes):
            # The version and the flush come with the last bucket: before it the server holds a mixture.
            last = {"weight_version": str(version), "flush_cache": self.pool.flushes}
            self._group.broadcast(bucket, last if is_last else {"flush_cache": False})
        if has_sessions:
            self.pool.post("/end_weight_update", {})

    def _begin(self) -> bool:
        """Opens the servers' update session. False for older servers, which have no such route."""
        try:
            self.pool.post("/begin_weight_update", {})
        except RequestRefused as refused:
            if refused.status == 404:
                return False
            # A push that broke off, perhaps of a run before this one, has left a session open.
            with suppress(RequestRefused):
                self.pool.post("/end_weight_update", {})
            self.pool.post("/begin_weight_update", {})
        return True

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def close(self) -> None:
        self._leave()
        if self.pool is not None:
            self.pool.close()


class SendAgain(Exception):
    """A broadcast broke off; the servers that are left need all the tensors again."""


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


def from_rank_0(weights: NamedTensors, send: Callable[[Iterator[tuple[str, Tensor]]], None] | None) -> str:
    """Runs `send`, which rank 0 passes, on an iterator over the weights, while the other ranks iterate. Collective.

    Returns:
        DONE, or AGAIN after a `SendAgain`.

    Raises:
        PushFailed: on every rank.
    """
    tensors = iter(weights)
    failure = None
    if send is not None:
        try:
            send(tensors)
        except Exception as error:  # of any kind: it must reach the other ranks, which wait for this one
            failure = error
    # What rank 0 has left after a failure, and all elsewhere: the other ranks are in each full_tensor.
    for _ in tensors:
        pass
    outcome, _, why = broadcast_text(outcome_of(failure)).partition(" ")
    if outcome == FAILED:
        raise PushFailed(f"the weights did not reach the servers: {why}") from failure
    return outcome


def outcome_of(failure: Exception | None) -> str:
    if failure is None:
        return DONE
    if isinstance(failure, SendAgain):
        logger.warning("sending the weights again, in a new group: %s", failure.__cause__)
        return AGAIN
    return f"{FAILED} {type(failure).__name__}: {failure}"


def broadcast_text(text: str) -> str:
    """Rank 0's text, on every rank. Collective."""
    if not dist.is_initialized():
        return text
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    padded = text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    message = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    dist.broadcast(message, src=0)
    return bytes(message.tolist()).rstrip(b"\0").decode(errors="replace")
