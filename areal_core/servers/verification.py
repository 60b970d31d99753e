"""Verification, after every k-th weight update, that the servers hold the weights that were sent.

A server may accept a tensor that is one row short without an error and keep the old row; only its
checksums show that. A `WeightCheck` calls `/weights_checker` before the update, for the names under
which the servers hold weights, and after it, for their checksums.

The route returns, for each rank of a server, a 64-bit hash of every parameter under the *server's*
name, so ours must be computed of the tensors in the server's layout:

    sent                                      held by the server
    ...self_attn.{q,k,v}_proj.weight    ->    ...self_attn.qkv_proj.weight      the parts concatenated
    ...mlp.{gate,up}_proj.weight        ->    ...mlp.gate_up_proj.weight        the same
    model.embed_tokens.weight           ->    the same name                     padded with zero rows to a multiple of 64
    any                                 ->    the same name                     in the server's dtype

vLLM, and SGLang on the CPU, hash with SHA-256; SGLang 0.5.23 on a GPU with a hash of 32-bit words
(`words_hash`). Weights that cannot be compared (tensor-parallel shards, fused experts, quantised
weights) are counted and named, and are no mismatch.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal_core.rollout.errors import RequestRefused, WeightsDiffer
from areal_core.servers.pool import ServerPool
from areal_core.servers.wire import HeldWeights

MAX_NAMED = 8  # tensors in a message
# Parameters of a server that concatenate several sent ones.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PADDED = ("embed_tokens.weight", "lm_head.weight")
PADDING_ROWS = 64
# Buffers that are computed from the config alone, and so are never sent.
DERIVED = ("cos_sin_cache", "cos_cache", "sin_cache", "inv_freq")
# Constants of `words_hash`.
MASK_32, MASK_64 = (1 << 32) - 1, (1 << 64) - 1
TILE_WORDS = 8192
CHUNK_TILES = 512
SEED = 0x243F6A88
# (multiplier of the position, seed, rotation of the position) of each 32-bit half of a hash.
HALVES = ((0x27D4EB2D, SEED, 15), (0x165667B1, ((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & MASK_32, 13))
logger = logging.getLogger(__name__)


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names under which the parts of a server's parameter are sent."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
    return (name,)


@dataclass(frozen=True)
class Difference:
    """The result of a comparison, in the server's names."""

    differ: list[str]
    not_compared: list[str]


@dataclass
class ExpectedWeights:
    """Checksums of the tensors that are sent, in the servers' layout.

    Args:
        names: the servers' names of parameters.
        hash_tensor: `sha256_of` or `words_hash`, by the servers' device.
        dtype: the servers' dtype of weights, if known.
    """

    names: Iterable[str]
    hash_tensor: Callable[[Tensor], str]
    dtype: torch.dtype | None = None
    checksums: dict[str, set[str]] = field(default_factory=dict, init=False)
    unheld: list[str] = field(default_factory=list, init=False)  # sent names that no server has
    _holders: dict[str, list[str]] = field(default_factory=dict, init=False)
    _waiting: dict[str, dict[str, Tensor]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name in self.names:
            for part in parts_of(name):
                self._holders.setdefault(bare(part), []).append(name)

    def covers(self, name: str) -> bool:
        return bare(name) in self._holders

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors and hash them; parts are kept until their parameter is complete."""
        for name, tensor in weights:
            if not self.covers(name):
                self.unheld.append(name)
                yield name, tensor
                continue
            for holder in self._holders[bare(name)]:
                parts = self._waiting.setdefault(holder, {})
                parts[bare(name)] = tensor
                if len(parts) == len(parts_of(holder)):
                    self._add(holder, [parts[bare(part)] for part in parts_of(holder)])
                    del self._waiting[holder]
            yield name, tensor

    def _add(self, name: str, parts: list[Tensor]) -> None:
        full = parts[0] if len(parts) == 1 else torch.cat(parts)
        layouts = [full if self.dtype is None else full.to(self.dtype)]
        if self.dtype is None and full.dtype == torch.float32:  # dtype "auto" may be any of these
            layouts += [full.to(torch.bfloat16), full.to(torch.float16)]
        if name.endswith(PADDED) and (missing := -len(full) % PADDING_ROWS):
            layouts += [torch.cat([t, t.new_zeros(missing, *t.shape[1:])]) for t in layouts]
        self.checksums[name] = {self.hash_tensor(layout) for layout in layouts}

    def compare(self, held: HeldWeights) -> Difference:
        """Return the parameters that differ, and those that cannot be compared."""
        names = [name for name in held.checksums if not name.endswith(DERIVED)]
        if held.is_sharded:
            return Difference([], names)
        known = [name for name in names if name in self.checksums]
        return Difference(
            [name for name in known if not set(held.checksums[name]) <= self.checksums[name]],
            [*self.unheld, *(name for name in names if name not in self.checksums)],
        )


def bare(name: str) -> str:
    """Return a name without the modules that a server and a checkpoint of a vision model differ in."""
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def sha256_of(tensor: Tensor) -> str:
    """Return 16 hex digits of the SHA-256 of the tensor's bytes."""
    return hashlib.sha256(bytes_of(tensor).cpu().numpy().data).hexdigest()[:16]


def words_hash(tensor: Tensor) -> str:
    """Return 16 hex digits, as SGLang on a GPU does.

    The bytes are 32-bit words, zero-padded. A word is mixed with its position (MurmurHash3's 32-bit
    finaliser), the mixed words of a tile of 8,192 are summed, the sum is mixed with the length, two
    such halves form one 64-bit value, the tiles' values are summed, and the sum goes through the
    finaliser of SplitMix64. Computed on the tensor's device in int64: torch has no uint32
    arithmetic.
    """
    raw = bytes_of(tensor)
    words = torch.nn.functional.pad(raw, (0, -len(raw) % 4)).view(torch.int32)
    total = 0
    for start in range(0, len(words), TILE_WORDS * CHUNK_TILES):
        chunk = words[start : start + TILE_WORDS * CHUNK_TILES].to(torch.int64) & MASK_32
        position = torch.arange(start, start + len(chunk), device=chunk.device) & MASK_32
        high, low = (
            tile_sums(mix_32(chunk ^ mixed_position(position, *half)), len(words)) for half in HALVES
        )
        total += (int(high.sum()) << 32) + int(low.sum())
    return f"{mix_64(total & MASK_64):016x}" if len(words) else f"{0:016x}"


def mixed_position(position: Tensor, multiplier: int, seed: int, rotation: int) -> Tensor:
    rotated = ((position << rotation) | (position >> (32 - rotation))) & MASK_32
    return ((multiply_32(position, multiplier) + seed) & MASK_32) ^ rotated


def tile_sums(words: Tensor, num_words: int) -> Tensor:
    padded = torch.nn.functional.pad(words, (0, -len(words) % TILE_WORDS))
    return mix_32((padded.view(-1, TILE_WORDS).sum(1) & MASK_32) ^ (num_words * 4 & MASK_32))


def mix_32(x: Tensor) -> Tensor:
    x = multiply_32(x ^ (x >> 16), 0x85EBCA6B)
    x = multiply_32(x ^ (x >> 13), 0xC2B2AE35)
    return x ^ (x >> 16)


def multiply_32(x: Tensor, factor: int) -> Tensor:
    """Return x * factor modulo 2**32, in int64.

    The product of two 32-bit numbers may overflow int64, so the factor is split into halves.
    """
    low = x * (factor & 0xFFFF)
    high = (x * (factor >> 16) & 0xFFFF) << 16
    return (low + high) & MASK_32


def mix_64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


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

    def covers(self, name: str) -> bool:
        """Return whether the comparison of this update shows a tensor that is sent by this name."""
        return self._expected is not None and self._expected.covers(name)

    def compare(self, pool: ServerPool, version: int) -> None:
        """Raise `WeightsDiffer`, which names the tensors, if a server holds unexpected weights."""
        if self._expected is None:
            return
        for server, body in pool.post(pool.wire.checksums()).items():
            found = self._expected.compare(pool.wire.parse_checksums(body))
            if found.not_compared and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "not compared with what %s holds: %s", server.address, join_names(found.not_compared)
                )
            if found.differ:
                raise WeightsDiffer(
                    f"after the weight update to version {version} the server at {server.address} holds other weights "
                    f"than the trainer: {join_names([describe(name) for name in found.differ])}; its engine may have accepted "
                    f"a tensor of another shape or dtype without an error "
                    f"(this check is set by rollout.verify_weights_every={self.every})"
                )

    def _prepare(self, pool: ServerPool) -> ExpectedWeights | None:
        try:
            replies = pool.post(pool.wire.checksums())
            held = [pool.wire.parse_checksums(body) for body in replies.values()]
        except RequestRefused as refused:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("weight updates are not verified, the server does not support it: %s", refused)
            return None
        identity = pool.identity()
        return ExpectedWeights(
            names_of(held),
            sha256_of if pool.wire.hashes_by_sha256(identity.device) else words_hash,
            getattr(torch, identity.dtype) if identity.dtype in ("float32", "bfloat16", "float16") else None,
        )


def names_of(held: Iterable[HeldWeights]) -> Iterator[str]:
    """Yield the names of all parameters whose checksums are those of whole tensors, each once."""
    whole = (weights.checksums for weights in held if not weights.is_sharded)
    yield from dict.fromkeys(name for checksums in whole for name in checksums)


def describe(name: str) -> str:
    """Return the name of a server's parameter, with the modules whose tensors were sent for it."""
    parts = parts_of(name)
    return name if len(parts) == 1 else f"{name} (sent as {', '.join(part.split('.')[-2] for part in parts)})"


def join_names(names: list[str]) -> str:
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)}, {', '.join(names[:MAX_NAMED])}{rest}"
