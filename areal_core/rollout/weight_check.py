"""Verification, after every k-th weight update, that the servers hold the weights that were sent.

A server may accept a tensor that is one row short without an error and keep the old row; only its
checksums show that. A check makes two calls: before the update for the names under which the
servers hold weights, after it for their checksums.
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
    """Compare the first weight update and every k-th one after it.

    Args:
        every: k; 0 disables the check.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._num_updates = 0
        self._expected: ExpectedWeights | None = None
        self._has_warned = False

    def watch(self, weights: Iterable[tuple[str, Tensor]], pool: ServerPool) -> Iterable[tuple[str, Tensor]]:
        """Return the weights of an update; if a check is due, iteration hashes them."""
        is_due = self.every > 0 and self._num_updates % self.every == 0
        self._num_updates += 1
        self._expected = self._prepare(pool) if is_due else None
        return weights if self._expected is None else self._expected.watch(weights)

    def read(self, weights: Iterable[tuple[str, Tensor]], pool: ServerPool) -> None:
        """Do as `watch` for weights that are not sent; they are read only if a check is due."""
        watched = self.watch(weights, pool)
        if self._expected is not None:
            for _ in watched:
                pass

    def compare(self, pool: ServerPool, version: int) -> None:
        """Raise `WeightsDiffer`, which names the tensors, if a server holds unexpected weights."""
        if self._expected is None:
            return
        for server, body in pool.post(CHECKER, {"action": "checksum"}).items():
            found = self._expected.compare(parse_checksums(body))
            if found.not_compared and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "not compared with what %s holds: %s", server.address, named(found.not_compared)
                )
            if found.differ:
                raise WeightsDiffer(
                    f"after the weight update to version {version} the server at {server.address} holds other weights "
                    f"than the trainer: {named([describe(name) for name in found.differ])}; its engine may have accepted "
                    f"a tensor of another shape or dtype without an error "
                    f"(this check is set by rollout.verify_weights_every={self.every})"
                )

    def _prepare(self, pool: ServerPool) -> ExpectedWeights | None:
        try:
            held = [parse_checksums(body) for body in pool.post(CHECKER, {"action": "checksum"}).values()]
        except RequestRefused as refused:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("weight updates are not verified, the server does not support it: %s", refused)
            return None
        identity = pool.identity()
        return ExpectedWeights(
            names_of(held),
            sha256_of if identity.device == "cpu" else words_hash,
            getattr(torch, identity.dtype) if identity.dtype in ("float32", "bfloat16", "float16") else None,
        )


def names_of(held: Iterable[HeldWeights]) -> Iterator[str]:
    """Yield the names of all parameters, each once."""
    yield from dict.fromkeys(name for weights in held for name in weights.checksums)


def describe(name: str) -> str:
    """Return the name of a server's parameter, with the modules whose tensors were sent for it."""
    parts = parts_of(name)
    return name if len(parts) == 1 else f"{name} (sent as {', '.join(part.split('.')[-2] for part in parts)})"


def named(names: list[str]) -> str:
    """Return the number of tensors and the first few names."""
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)}, {', '.join(names[:MAX_NAMED])}{rest}"
