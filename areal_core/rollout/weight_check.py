"""Asks the servers, after every k-th push, whether they hold what was pushed.

A server may take a tensor that is a row short without a word and keep the old row; only its checksums tell. Two calls a check:
before the push for the names under which the servers hold weights, after it for their checksums.
"""

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from areal_core.rollout.errors import RequestRefused, WeightsDiffer
from areal_core.rollout.server_pool import ServerPool
from areal_core.rollout.weight_checksums import (
    ExpectedWeights,
    HeldWeights,
    parse_checksums,
    parts_of,
    sha256_of,
    words_hash,
)

CHECKER = "/weights_checker"
MAX_NAMED = 8
logger = logging.getLogger(__name__)


class WeightCheck:
    """Compares the first push and every k-th one after it.

    Args:
        every: k; 0 compares none.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._num_pushes = 0
        self._expected: ExpectedWeights | None = None
        self._is_told = False

    def watch(self, weights: Iterable[tuple[str, Tensor]], pool: ServerPool) -> Iterable[tuple[str, Tensor]]:
        """The weights of a push; their checksums are taken on the way when this push is to be compared."""
        is_due = self.every > 0 and self._num_pushes % self.every == 0
        self._num_pushes += 1
        self._expected = self._prepare(pool) if is_due else None
        return weights if self._expected is None else self._expected.watch(weights)

    def read(self, weights: Iterable[tuple[str, Tensor]], pool: ServerPool) -> None:
        """The same for weights that servers have without a push; they are read only when they are to be compared."""
        watched = self.watch(weights, pool)
        if self._expected is not None:
            for _ in watched:
                pass

    def compare(self, pool: ServerPool, version: int) -> None:
        """Raises `WeightsDiffer`, which names the tensors, when a server holds other weights than were pushed."""
        if self._expected is None:
            return
        for server, body in pool.post(CHECKER, {"action": "checksum"}).items():
            found = self._expected.compare(parse_checksums(body))
            if found.not_compared and not self._is_told:
                self._is_told = True
                logger.warning(
                    "not compared with what %s holds: %s", server.address, named(found.not_compared)
                )
            if found.differ:
                raise WeightsDiffer(
                    f"after the push of version {version} the server at {server.address} holds other weights than the trainer: "
                    f"{named([describe(name) for name in found.differ])}; its engine may have taken a tensor of another shape or "
                    f"dtype without a word (rollout.verify_weights_every={self.every} asks for this check)"
                )

    def _prepare(self, pool: ServerPool) -> ExpectedWeights | None:
        try:
            held = [parse_checksums(body) for body in pool.post(CHECKER, {"action": "checksum"}).values()]
        except RequestRefused as refused:
            if not self._is_told:
                self._is_told = True
                logger.warning("pushed weights are not verified, the server cannot: %s", refused)
            return None
        identity = pool.identity()
        return ExpectedWeights(
            names_of(held),
            sha256_of if identity.device == "cpu" else words_hash,
            getattr(torch, identity.dtype) if identity.dtype in ("float32", "bfloat16", "float16") else None,
        )


def names_of(held: Iterable[HeldWeights]) -> Iterator[str]:
    yield from dict.fromkeys(name for weights in held for name in weights.checksums)


def describe(name: str) -> str:
    """A server's parameter, with the modules whose tensors were pushed for it."""
    parts = parts_of(name)
    return (
        name if len(parts) == 1 else f"{name} (pushed as {', '.join(part.split('.')[-2] for part in parts)})"
    )


def named(names: list[str]) -> str:
    """The count and the first few."""
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)}, {', '.join(names[:MAX_NAMED])}{rest}"
