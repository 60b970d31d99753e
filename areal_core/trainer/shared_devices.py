"""Devices that the trainer and SGLang servers use in turn.

every rank                       rank 0 only                          each server
-----------------------------    ---------------------------------    ------------------------------
`to_trainer`
  barrier: all have their rows
                                 pause, flush the cache until idle    holds new requests
                                 release cache and weights            frees their memory
  agree
... trains; `write`: gathers the weights, which rank 0 writes to a folder ...
`to_engine`
  models leave the device
  barrier: all have left it
                                 resume the weights                   allocates them again
                                 load the folder                      has the new version
                                 resume the cache, continue           answers requests
  agree
... samples ...

No byte of the device is needed by both at once, so each may use all of it. Weights cannot be sent
by NCCL, which accepts a device once in a group; a folder needs no memory on it.

A server that dies is left out. None may join: it would take the trainer's memory.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from areal_core.rollout.errors import RequestRefused, SharingFailed
from areal_core.rollout.source import TrainedWeights, WrappedRollouts
from areal_core.servers.pool import ServerPool
from areal_core.servers.server import Server
from areal_core.servers.sglang import CACHE, SGLANG, WEIGHTS
from areal_core.servers.weight_update import (
    DiskUpdate,
    NamedTensors,
    broadcast_text,
    from_rank_0,
    read_safetensors,
)
from areal_core.telemetry.stats import Stats
from areal_core.trainer.live import LiveRollouts, SharedRollouts

IDLE_S, IDLE_DELAY_S = 60.0, 0.1  # that a server has to finish aborted requests, and between queries


class SharedDevices:
    """The turns of trainer and servers on the same devices. All methods are collectives.

    Args:
        servers: those of the run, which are awake.
        update: writes and loads weights; its pool has these servers, and is None on ranks other
            than 0.
        barrier: waits for all ranks.
        leave: releases the device memory of this rank's models; returns the bytes.
        stats: records bytes and seconds of a turn.
    """

    def __init__(
        self,
        servers: list[Server],
        update: DiskUpdate,
        barrier: Callable[[], None],
        leave: Callable[[], int],
        stats: Stats,
    ) -> None:
        self.servers, self.version = servers, 0
        self._update, self._barrier, self._leave, self._stats = update, barrier, leave, stats
        self._folder = update.model_path  # of the weights of `version`

    def to_trainer(self) -> None:
        """Let the servers release their memory, once every rank has what it wanted of them."""
        with self._stats.timing("engine_to_trainer"):
            self._barrier()
            self._on_rank_0(release)

    def write(self, weights: NamedTensors, version: int) -> None:
        """Write the weights that the servers load at their next turn; in the trainer's turn."""
        pool, update = self._update.pool, self._update
        folder = update.folder / f"v{version}"
        from_rank_0(weights, None if pool is None else lambda tensors: update.write(tensors, folder))
        self._remove_written()
        self._folder, self.version = folder, version

    def to_engine(self) -> None:
        with self._stats.timing("trainer_to_engine"):
            self._stats.scalar(offloaded_bytes=self._leave())
            self._barrier()
            self._on_rank_0(self._wake)

    @contextmanager
    def turn_of_engine(self) -> Iterator[None]:
        """Give the servers the devices during the body; an exception of the body ends the run."""
        self.to_engine()
        yield
        self.to_trainer()

    def _wake(self, pool: ServerPool) -> None:
        pool.post(SGLANG.resume_memory(WEIGHTS))
        if self.version:  # the first weights have the dtype of their files, perhaps not the servers'
            self._update.check.read(read_safetensors(self._folder), pool)
        self._update.load(pool, self._folder, self.version)
        pool.post(SGLANG.resume_memory(CACHE))
        pool.resume()

    def _on_rank_0(self, act: Callable[[ServerPool], None]) -> None:
        failure: Exception | None = None
        if self._update.pool is not None:
            try:
                act(self._update.pool)
            except Exception as error:  # of any type: it must reach the other ranks, which wait
                failure = error
        if reason := broadcast_text("" if failure is None else f"{type(failure).__name__}: {failure}"):
            raise SharingFailed(
                f"the servers did not take their turn on the trainer's devices: {reason}"
            ) from failure

    def _remove_written(self) -> None:
        if self._update.pool is not None and self._folder != self._update.model_path:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Remove the written weights and close the pool."""
        self._remove_written()
        self._update.close()


def release(pool: ServerPool) -> None:
    """Pause the servers of a pool and release their memory, once their last request has ended."""
    pool.pause()
    deadline = time.monotonic() + IDLE_S
    while True:  # an answered request may occupy the scheduler a moment longer
        try:
            pool.post(SGLANG.flush_cache(), needs_all=True)
            break
        except RequestRefused:
            if time.monotonic() > deadline:
                raise
            time.sleep(IDLE_DELAY_S)
    pool.post(SGLANG.release_memory())


class TurnRollouts(WrappedRollouts):
    """A `RolloutSource` that samples in the turns of the servers, from the weights of each turn.

    Args:
        sampled: the rollouts of this rank, without a weight update of their own; no prompt runs
            between two batches, because none may be stale.
    """

    sampled: LiveRollouts | SharedRollouts

    def __init__(self, sampled: LiveRollouts | SharedRollouts, devices: SharedDevices) -> None:
        super().__init__(sampled)
        self.devices = devices

    def next_batch(self, step: int, version: int) -> dict[str, Tensor]:
        """Return the rows of a turn of the servers; a collective."""
        with self.turn_of_engine():
            self.sampled.start_version(version)
            return self.sampled.next_batch(step, version)

    @contextmanager
    def turn_of_engine(self) -> Iterator[None]:
        """Give the servers the devices during the body, for requests; a collective."""
        with self.devices.turn_of_engine():
            self.sampled.use_weights(self.devices.version)
            yield

    def update_weights(self, engine: TrainedWeights, version: int) -> None:
        """Write the weights, for the next turn of the servers; a collective."""
        self.devices.write(engine.named_full_tensors(), version)

    def close(self) -> None:
        """Close the rollouts and the turns."""
        super().close()
        self.devices.close()
