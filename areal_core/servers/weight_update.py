"""Weight updates of the inference servers: through a folder, by broadcast, or as an adapter.

`DiskUpdate` and `BroadcastUpdate` send all weights:

    every rank                       rank 0 only                              each server
    -------------------------        -------------------------------------    ---------------------------
                                     adds new servers, drops dead ones
                                     pause_generation                         aborts or holds requests in flight
    for name, tensor in weights      gathers tensors into buckets
      (full_tensor: collective)      a bucket is full: send it                loads it
                                     compares checksums, when due             /weights_checker
                                     continue_generation                      continues, cache flushed
    agree: rank 0 broadcasts the outcome; a failure is raised on every rank

A rank that stopped iterating would leave the others waiting in `full_tensor`, so rank 0 keeps
iterating after a failure and raises it at the end. A server that dies in the middle of a broadcast
breaks the group: the ranks agree to iterate once more, and the remaining servers stay paused until
they have all of the new weights.

In the group of a broadcast (`UpdateGroup`) rank 0 of the trainer is rank 0, and server i has the
next `ranks_per_server` ranks. Both sides must enter each collective at the same time, so the HTTP
request that makes a server enter it runs in a thread while this side waits in it.

`AdapterUpdate` sends a new LoRA adapter; the base model stays unchanged:

    every rank                     rank 0 only                                     each server
    ---------------------------    ---------------------------------------------   -------------------------------------
    for name, tensor in adapter    adds new servers, drops dead ones
      (full_tensor: collective)    writes the folder
                                   load_lora_adapter NAME-vN                       adds it to the others, keeps sampling
                                   update_weight_version N                         reports N from now on
                                   pause_generation                                aborts requests in flight
                                   unload_lora_adapter, all but the last two
                                   compares the base model, when due               /weights_checker
                                   continue_generation

Each version of the adapter has a name of its own, so a request states which weights sample it,
whatever happens meanwhile. The server's `weight_version` still decides which servers may be used,
and determines the adapter with which an aborted request continues: it is raised once the adapter is
loaded, before requests are aborted. The previous adapter is kept for requests that start before
their client knows the new one.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from areal_core.engine.lora import Adapter, write_adapter
from areal_core.rollout.errors import RequestRefused, ServerDied, WeightsDiffer, WeightUpdateFailed
from areal_core.servers.client import adapter_name
from areal_core.servers.delta import Delta
from areal_core.servers.pool import ServerPool
from areal_core.servers.update_group import UpdateGroup
from areal_core.servers.verification import WeightCheck
from areal_core.servers.wire import LastBucket

MESSAGE_BYTES = 4096  # of the outcome that rank 0 broadcasts
DONE, AGAIN, FAILED = "done", "again", "failed"  # outcomes of one attempt
NamedTensors = Iterable[tuple[str, Tensor]]
logger = logging.getLogger(__name__)


class WeightUpdate(Protocol):
    """Transfer of weights to the inference engine."""

    def send(self, weights: NamedTensors, version: int) -> None:
        """Send all `weights` as `version`.

        Collective: every rank calls it and iterates to the end, perhaps more than once.
        """

    def close(self) -> None:
        """Release the servers and groups."""


@dataclass(eq=False)
class DiskUpdate:
    """A `WeightUpdate` through safetensors files in `folder/v{version}`, deleted after loading.

    Args:
        pool: the servers; None on ranks other than 0.
        folder: destination of the files; the servers must be able to read it.
        model_path: checkpoint folder whose `config.json` describes the weights.
        bucket_bytes: maximum bytes of a file, and of the tensors that rank 0 holds in memory.
        check: selects the updates that are compared with the servers' weights.
        grace_s: seconds between the pause and the loading.
    """

    pool: ServerPool | None
    folder: Path
    model_path: Path
    bucket_bytes: int = 1 << 30
    _: KW_ONLY
    check: WeightCheck = field(default_factory=lambda: WeightCheck(every=0))
    grace_s: float = 0.0

    def send(self, weights: NamedTensors, version: int) -> None:
        """Send the weights, see `WeightUpdate.send`. Raises `WeightUpdateFailed` on every rank."""
        pool = self.pool
        from_rank_0(weights, None if pool is None else lambda tensors: self._send_to(pool, tensors, version))

    def _send_to(self, pool: ServerPool, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        folder = self.folder / f"v{version}"
        try:
            pool.refresh()
            self.write(self.check.watch(weights, pool), folder)
            with pool.paused():
                time.sleep(self.grace_s)
                self.load(pool, folder, version)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def load(self, pool: ServerPool, folder: Path, version: int) -> None:
        """Let paused servers load a checkpoint folder, and compare what they hold when due."""
        for call in pool.wire.load_folder(folder, version, pool.flushes):
            pool.post(call)
        self.check.compare(pool, version)

    def write(self, weights: NamedTensors, folder: Path) -> None:
        """Write a checkpoint folder that servers can load."""
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


@dataclass(eq=False)
class BroadcastUpdate:
    """A `WeightUpdate` by broadcast from rank 0, in a separate process group with the servers.

    Args:
        pool: the servers; None on ranks other than 0.
        backend: "gloo" (CPU) or "nccl" (GPU).
        bucket_bytes: maximum bytes of one request, and of memory on rank 0 in addition to the
            model.
        ranks_per_server: tensor- and pipeline-parallel ranks of one server.
        timeout_s: maximum seconds to wait for the group to form, or for one bucket.
        check: selects the updates that are compared with the servers' weights.
        grace_s: seconds between the pause and the first tensor.
        delta: leaves tensors out that the servers hold; `check` must then compare each update.
    """

    pool: ServerPool | None
    backend: str
    bucket_bytes: int = 1 << 30
    ranks_per_server: int = 1
    timeout_s: float = 300.0
    _: KW_ONLY
    check: WeightCheck = field(default_factory=lambda: WeightCheck(every=0))
    grace_s: float = 0.0
    delta: Delta | None = None
    _group: UpdateGroup | None = field(default=None, init=False)
    _is_again: bool = field(default=False, init=False)  # another attempt at the same update

    def send(self, weights: NamedTensors, version: int) -> None:
        """Send the weights, see `WeightUpdate.send`. Raises `WeightUpdateFailed` on every rank."""
        pool = self.pool
        self._is_again = False
        send = None if pool is None else lambda tensors: self._send_to(pool, tensors, version)
        while from_rank_0(weights, send) == AGAIN:
            self._is_again = True
            if iter(weights) is weights:  # the same on every rank
                raise WeightUpdateFailed(
                    "the weight update was interrupted (the reason is in the log), and weights that are an "
                    "iterator cannot be sent again"
                )

    def _send_to(self, pool: ServerPool, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Make one attempt. Raises `SendAgain`, with the servers paused, if another may succeed."""
        was_formed = self._group is not None
        try:
            pool.refresh(is_again=self._is_again)
            pool.pause()
            time.sleep(self.grace_s)
            sent = self.check.watch(weights, pool)
            if self.delta is not None:
                sent = self.delta.changed(sent, pool, self.check.covers)
            self._broadcast(pool, sent, version)
            self.check.compare(pool, version)
            if self.delta is not None:
                self.delta.commit(version, pool)
        except BaseException as error:
            if self._group is not None:
                self._group.break_off()  # so that servers that wait in it get an error
            self._group = None
            if self._may_retry(pool, error, was_formed):
                pool.refresh(is_again=True)
                raise SendAgain from error
            with suppress(ServerDied, RequestRefused):
                pool.resume()
            raise
        pool.resume()

    def _may_retry(self, pool: ServerPool, error: BaseException, was_formed: bool) -> bool:
        """Return whether another attempt may succeed.

        It may after the loss of a server, without it, and in a new group, if a server may have been
        restarted since this one was formed.
        """
        if not isinstance(error, RuntimeError) or isinstance(error, WeightsDiffer):
            return False
        return was_formed or pool.has_lost_one()

    def _broadcast(self, pool: ServerPool, weights: NamedTensors, version: int) -> None:
        has_sessions = self._begin(pool)
        # After the last call that tolerates the loss of a server: from here on the servers of the
        # group and of the pool are the same.
        if self._group is None or self._group.servers != pool.servers:
            self.leave()
            self._group = UpdateGroup(pool, self.backend, self.ranks_per_server, self.timeout_s)
        for bucket, is_last in bucketed(weights, self.bucket_bytes):
            # The version and the flush come with the last bucket: until then the weights are mixed.
            self._group.broadcast(bucket, LastBucket(version, pool.flushes) if is_last else None)
        self._group.is_new = False
        if has_sessions:
            pool.post(pool.wire.end_update(version))

    def _begin(self, pool: ServerPool) -> bool:
        """Open the servers' update session. Returns False for older servers without this route."""
        try:
            pool.post(pool.wire.begin_update(), needs_all=True)
        except RequestRefused as refused:
            if refused.status == 404:
                return False
            # An interrupted update, perhaps of an earlier run, has left a session open.
            with suppress(RequestRefused):
                pool.post(pool.wire.end_update(None))
            pool.post(pool.wire.begin_update())
        return True

    def leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def close(self) -> None:
        """Leave the group and close the pool."""
        self.leave()
        if self.pool is not None:
            self.pool.close()


class SendAgain(Exception):
    """A broadcast was interrupted; the remaining servers need all tensors again."""


def bucketed(weights: NamedTensors, bucket_bytes: int) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Yield lists of tensors of at most `bucket_bytes` (or one larger tensor).

    Each comes with True if it is the last.
    """
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
    """Run rank 0's `send` on an iterator over the weights, while other ranks iterate. Collective.

    Returns:
        DONE, or AGAIN after a `SendAgain`.

    Raises:
        WeightUpdateFailed: on every rank.
    """
    tensors = iter(weights)
    failure = None
    if send is not None:
        try:
            send(tensors)
        except Exception as error:  # of any type: it must reach the other ranks, which wait
            failure = error
    # The rest on rank 0 after a failure, all weights elsewhere: each full_tensor is collective.
    for _ in tensors:
        pass
    outcome, _, reason = broadcast_text(outcome_of(failure)).partition(" ")
    if outcome == FAILED:
        raise WeightUpdateFailed(f"the weights did not reach the servers: {reason}") from failure
    return outcome


def outcome_of(failure: Exception | None) -> str:
    """Return DONE, AGAIN, or FAILED with the error's text; log the cause of AGAIN."""
    if failure is None:
        return DONE
    if isinstance(failure, SendAgain):
        logger.warning("sending the weights again, in a new group: %s", failure.__cause__)
        return AGAIN
    return f"{FAILED} {type(failure).__name__}: {failure}"


def broadcast_text(text: str) -> str:
    """Return rank 0's text on every rank. Collective."""
    if not dist.is_initialized():
        return text
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    padded = text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    message = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    dist.broadcast(message, src=0)
    return bytes(message.tolist()).rstrip(b"\0").decode(errors="replace")


@dataclass(eq=False)
class AdapterUpdate:
    """A `WeightUpdate` of `engine.lora.AdapterTensors`, through files in `folder/v{version}`.

    The files are deleted once the servers have loaded them.

    Args:
        pool: the servers; None on ranks other than 0.
        folder: destination of the files; the servers must be able to read it.
        adapter: rank, scale and base model of the adapter.
        name: name of the adapter without its version.
        check: selects the updates after which the base model is compared with
            `adapter.base_model`, where that is a local folder.
        grace_s: seconds for which the servers stay paused.
    """

    pool: ServerPool | None
    folder: Path
    adapter: Adapter
    name: str
    _: KW_ONLY
    check: WeightCheck = field(default_factory=lambda: WeightCheck(every=0))
    grace_s: float = 0.0
    _last: str = field(default="", init=False)  # name of the adapter that was sent last
    # Names that servers may still have; vLLM does not list them.
    _sent: set[str] = field(default_factory=set, init=False)

    def send(self, weights: NamedTensors, version: int) -> None:
        """Send the adapter's tensors as `version`. Collective, see `WeightUpdate.send`."""
        pool = self.pool
        from_rank_0(weights, None if pool is None else lambda tensors: self._send_to(pool, tensors, version))

    def _send_to(self, pool: ServerPool, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        folder = self.folder / f"v{version}"
        name = adapter_name(self.name, version)
        try:
            pool.refresh()
            write_adapter(folder, tensors, self.adapter)
            self.check.read(read_safetensors(Path(self.adapter.base_model)), pool)
            loaded = self._load(pool, name, folder)
            pool.post(pool.wire.set_version(version))
            with pool.paused():
                time.sleep(self.grace_s)
                self._unload(pool, (loaded | self._sent) - {name, self._last})
                self.check.compare(pool, version)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._last, self._sent = name, {name, self._last}

    def _load(self, pool: ServerPool, name: str, folder: Path) -> set[str]:
        load = pool.wire.load_adapter(name, folder)
        try:
            replies = pool.post(load, needs_all=True)
        except RequestRefused:
            # An earlier run, or an interrupted update, has left an adapter of that name; a refusal
            # for any other reason is repeated.
            self._unload(pool, {name})
            replies = pool.post(load)
        loaded = [pool.wire.parse_loaded(body) for body in replies.values()]
        for server, names in zip(replies, loaded, strict=True):
            if name not in names:
                raise WeightUpdateFailed(
                    f"{server.address} reports the adapters {sorted(names)} after {name} was loaded"
                )
        return set().union(*loaded)

    def _unload(self, pool: ServerPool, names: Iterable[str]) -> None:
        for name in names:
            if name.startswith(adapter_name(self.name, "")):
                with suppress(RequestRefused):
                    pool.post(pool.wire.unload_adapter(name))

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def read_safetensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a checkpoint folder; nothing if the folder does not exist here."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                yield name, tensors.get_tensor(name)
