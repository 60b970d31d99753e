"""The order in which gloo sums over ranks: a ring, for all-reduce and for reduce-scatter.

gloo divides what it sums into as many chunks as there are ranks. The sum of chunk c starts on rank
c - 1 and is handed down the ranks, each of which adds its own values; it ends on rank c:

    chunk 0 of 4 ranks    ((x3 + x2) + x1) + x0
    chunk 1               ((x0 + x3) + x2) + x1

An average is that sum, divided by the number of ranks. Torch lets gloo reduce-scatter as an
all-reduce of the whole, whose chunks need not be the shards. So it was measured with gloo of torch
2.14, at sizes of 8 to 5 million elements, on 2 to 8 ranks.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MOST_BYTES = 1 << 20  # of a segment, of which a chunk has two or more
Piece = tuple[int, int, int]  # chunk; first and last element + 1 of a flat tensor


def chunk_size(num_elements: int, element_size: int, num_ranks: int) -> int:
    """Return the number of elements of a chunk; the last chunks may be shorter, or empty."""
    size = num_elements * element_size
    num_segments = max(-(-size // MOST_BYTES), 2 * num_ranks)
    per_rank = -(-num_segments // num_ranks)
    return per_rank * -(-size // (per_rank * num_ranks * element_size))


def pieces_of(num_elements: int, element_size: int, num_ranks: int) -> list[Piece]:
    """Return the chunks of a tensor."""
    size = max(1, chunk_size(num_elements, element_size, num_ranks))
    starts = range(0, num_elements, size)
    return [(n, start, min(start + size, num_elements)) for n, start in enumerate(starts)]


def pieces_of_shards(
    shapes: Sequence[torch.Size], num_ranks: int, process: int, num_processes: int
) -> list[list[Piece]]:
    """Return the pieces of a process's float32 shard of each tensor that FSDP sums at once.

    Args:
        num_ranks: that summed; FSDP gave each of them as many rows of a tensor, padded.
        process, num_processes: that have the shards now.
    """
    sizes = [padded_size(shape, num_ranks) for shape in shapes]
    chunk = chunk_size(sum(sizes) * num_ranks, 4, num_ranks)
    found, offset = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        own = padded_size(shape, num_processes)
        first, last = (min(n * own, math.prod(shape)) for n in (process, process + 1))
        pieces, start = [], first
        while start < last:
            owner, within = divmod(start, size)
            position = owner * sum(sizes) + offset + within  # in what gloo summed
            number = position // chunk
            end = min(last, (owner + 1) * size, start + (number + 1) * chunk - position)
            pieces.append((number, start - first, end - first))
            start = end
        found.append(pieces)
        offset += size
    return found


def padded_size(shape: torch.Size, num_ranks: int) -> int:
    """Return the elements of a tensor that one rank gets: FSDP pads the first dimension."""
    first, *rest = shape
    return -(-first // num_ranks) * math.prod(rest)


def sum_as_gloo(parts: Sequence[Tensor], pieces: Sequence[Piece] | None = None) -> Tensor:
    """Return the sum of the tensors of all ranks, in rank order, with gloo's bits.

    Args:
        pieces: of these tensors, if they are a part of what gloo summed.
    """
    flat = [part.reshape(-1) for part in parts]
    total = torch.zeros_like(flat[0])  # also of padding
    if pieces is None:
        pieces = pieces_of(total.numel(), total.element_size(), len(parts))
    for chunk, start, end in pieces:
        piece = total[start:end]
        piece.copy_(flat[chunk - 1][start:end])
        for rank in range(chunk - 2, chunk - 1 - len(flat), -1):
            piece += flat[rank % len(flat)][start:end]
    return total.view(parts[0].shape)
