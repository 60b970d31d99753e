"""Whether the servers hold the weights that were pushed: SGLang's `/weights_checker` against checksums of our own.

The route answers, for each rank of a server, a 64-bit hash of every parameter under the *server's* name, so ours must be taken of
the tensors as the server lays them out:

    pushed                                    held
    ...self_attn.{q,k,v}_proj.weight    ->    ...self_attn.qkv_proj.weight      the parts after one another
    ...mlp.{gate,up}_proj.weight        ->    ...mlp.gate_up_proj.weight        the same
    model.embed_tokens.weight           ->    the same name                     zero rows up to a multiple of 64
    any                                 ->    the same name                     in the server's dtype

A server on the CPU hashes with SHA-256, one on a GPU with a hash of 32-bit words (`words_hash`); read in SGLang 0.5.23. What cannot be
compared (tensor-parallel shards, fused experts, quantised weights) is counted and named, and is no mismatch.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal_core.rollout.errors import MalformedReply

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PADDED = ("embed_tokens.weight", "lm_head.weight")
PADDING_ROWS = 64
# What is computed from the config alone, and so is never pushed.
DERIVED = ("cos_sin_cache", "cos_cache", "sin_cache", "inv_freq")


@dataclass(frozen=True)
class HeldWeights:
    """What one server answered: by parameter, 16 hex digits from each rank that holds it."""

    checksums: dict[str, list[str]]
    is_sharded: bool  # tensor parallel: a rank holds parts of tensors


def parse_checksums(body: str) -> HeldWeights:
    """Parses a reply of `/weights_checker`. Raises `MalformedReply` with what was missing."""
    try:
        ranks = json.loads(body)["ranks"]
        checksums: dict[str, list[str]] = {}
        for rank in ranks:
            for name, checksum in rank["checksums"].items():
                checksums.setdefault(name, []).append(checksum)
        is_sharded = any(info["tp_size"] > 1 for rank in ranks for info in rank["parallelism_info"])
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedReply(
            f"a /weights_checker reply is not what SGLang 0.5 sends ({error!r}); it begins {body[:200]!r}"
        ) from error
    return HeldWeights(checksums, is_sharded)


def parts_of(name: str) -> tuple[str, ...]:
    """The names under which the parts of a server's parameter are pushed."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
    return (name,)


@dataclass(frozen=True)
class Difference:
    """What a comparison found, in the server's names."""

    differ: list[str]
    not_compared: list[str]


@dataclass
class ExpectedWeights:
    """Checksums of pushed tensors, laid out as servers hold them.

    Args:
        names: the servers' names.
        hash_tensor: `sha256_of` or `words_hash`, as the servers' device has it.
        dtype: in which the servers hold weights, where that is known.
    """

    names: Iterable[str]
    hash_tensor: Callable[[Tensor], str]
    dtype: torch.dtype | None = None
    checksums: dict[str, set[str]] = field(default_factory=dict, init=False)
    unheld: list[str] = field(default_factory=list, init=False)  # pushed under names that no server has
    _holders: dict[str, list[str]] = field(default_factory=dict, init=False)
    _waiting: dict[str, dict[str, Tensor]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name in self.names:
            for part in parts_of(name):
                self._holders.setdefault(part, []).append(name)

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Hands the tensors through and takes their checksums; parts are kept until all of their parameter are there."""
        for name, tensor in weights:
            if name not in self._holders:
                self.unheld.append(name)
                yield name, tensor
                continue
            for holder in self._holders[name]:
                parts = self._waiting.setdefault(holder, {})
                parts[name] = tensor
                if len(parts) == len(parts_of(holder)):
                    self._add(holder, [parts[part] for part in parts_of(holder)])
                    del self._waiting[holder]
            yield name, tensor

    def _add(self, name: str, parts: list[Tensor]) -> None:
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        layouts = [whole if self.dtype is None else whole.to(self.dtype)]
        if (
            self.dtype is None and whole.dtype == torch.float32
        ):  # what SGLang may make of it with dtype "auto"
            layouts += [whole.to(torch.bfloat16), whole.to(torch.float16)]
        if name.endswith(PADDED) and (missing := -len(whole) % PADDING_ROWS):
            layouts += [torch.cat([t, t.new_zeros(missing, *t.shape[1:])]) for t in layouts]
        self.checksums[name] = {self.hash_tensor(layout) for layout in layouts}

    def compare(self, held: HeldWeights) -> Difference:
        """Names the parameters that differ, and those of which nothing can be said."""
        names = [name for name in held.checksums if not name.endswith(DERIVED)]
        if held.is_sharded:
            return Difference([], names)
        known = [name for name in names if name in self.checksums]
        return Difference(
            [name for name in known if not set(held.checksums[name]) <= self.checksums[name]],
            [*self.unheld, *(name for name in names if name not in self.checksums)],
        )


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8 [bytes], on the tensor's device."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def sha256_of(tensor: Tensor) -> str:
    """16 hex digits: the first 8 bytes of the SHA-256 of the tensor's bytes, as a server on the CPU takes it."""
    return hashlib.sha256(memoryview(bytes_of(tensor).cpu().numpy())).hexdigest()[:16]


MASK_32, MASK_64 = (1 << 32) - 1, (1 << 64) - 1
TILE_WORDS = 8192
CHUNK_TILES = 512
SEED = 0x243F6A88
# (multiplier of the position, seed, rotation of the position) of each 32-bit half of a hash.
HALVES = ((0x27D4EB2D, SEED, 15), (0x165667B1, ((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & MASK_32, 13))


def words_hash(tensor: Tensor) -> str:
    """16 hex digits, as a server on a GPU takes them.

    The bytes are 32-bit words, zero-padded. A word is mixed with its position (MurmurHash3's 32-bit finaliser), the mixed words of
    a tile of 8,192 are summed, the sum is mixed with the length, two such halves are one 64-bit value, the tiles' values are
    summed, and the sum goes through the finaliser of SplitMix64. On the tensor's device, in int64: torch has no uint32 arithmetic.
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
    """Mixed sums of tiles of 8,192 words, int64 [tiles]; `num_words` are those of the whole tensor."""
    padded = torch.nn.functional.pad(words, (0, -len(words) % TILE_WORDS))
    return mix_32((padded.view(-1, TILE_WORDS).sum(1) & MASK_32) ^ (num_words * 4 & MASK_32))


def mix_32(x: Tensor) -> Tensor:
    x = multiply_32(x ^ (x >> 16), 0x85EBCA6B)
    x = multiply_32(x ^ (x >> 13), 0xC2B2AE35)
    return x ^ (x >> 16)


def multiply_32(x: Tensor, factor: int) -> Tensor:
    """x * factor modulo 2**32 in int64, where the product of two 32-bit numbers may overflow: half of the factor at a time."""
    low = x * (factor & 0xFFFF)
    high = (x * (factor >> 16) & 0xFFFF) << 16
    return (low + high) & MASK_32


def mix_64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)
