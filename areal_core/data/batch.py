"""A batch: a dict of tensors, padded `[B, T]` between functions, flat `[tokens]` for compute.

Keys, shapes and dtypes are listed in ARCHITECTURE.md. A tensor of two dimensions or more is per
token, one of one dimension is per row. The keys of pictures (`PER_IMAGE`, `PER_ENTRY`) are ragged
instead: the pictures of all rows one after another, `image_count` of each row. A picture is its
encoded file, or processed pixels. So each function here treats every other key alike.
"""

import heapq
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Batch = dict[str, Tensor]

FINISH_REASONS = ("stop", "length", "abort")
# Five are of agents' episodes only (areal_core/agent), image_count of rows with pictures.
PER_ROW = frozenset(
    {
        "rewards",
        "prompt_id",
        "sample_id",
        "finish_reason",
        "episode",
        "parent_turn",
        "branch",
        "failure",
        "image_count",
        "calls_bytes",
    }
)
PER_IMAGE = frozenset({"image_bytes", "image_units", "image_grid_thw"})  # [images] or [images, 3]
PER_ENTRY = {  # [entries, ...]: key -> key of the number of entries of each picture
    "image_data": "image_bytes",  # the bytes of its file
    "pixel_values": "image_units",  # its patches, or crops
}
# The transcript of an agent's episode, in bytes: key -> key of the number of bytes of each row.
PER_BYTE = {"calls_data": "calls_bytes"}
RAGGED = PER_IMAGE | PER_ENTRY.keys() | PER_BYTE.keys()


def sequence_lengths(batch: Batch) -> Tensor:
    """Number of tokens of each row, without padding: int64 [B]."""
    return batch["attention_mask"].sum(dim=1)


def pad_and_concat(batches: Sequence[Batch]) -> Batch:
    """Concatenate along rows, after right-padding per-token tensors with 0 to the longest.

    Raises:
        ValueError: there is no batch, or the keys differ.
    """
    if not batches:
        raise ValueError("pad_and_concat got no batches: give at least one, which determines the keys")
    keys = list(batches[0])
    for batch in batches:
        if set(batch) != set(keys):
            difference = sorted(set(batch) ^ set(keys))
            raise ValueError(f"batches have different keys: {difference} are not in all of them")
    width = max((b["attention_mask"].shape[1] for b in batches), default=0)
    return {key: torch.cat([_widen(key, batch[key], width) for batch in batches]) for key in keys}


def _widen(key: str, tensor: Tensor, width: int) -> Tensor:
    if key in RAGGED or tensor.dim() == 1 or tensor.shape[1] == width:
        return tensor
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, width - tensor.shape[1]))


def select_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return the given rows, in the given order, trimmed to the longest of them."""
    mask = batch["attention_mask"]
    index = torch.as_tensor(rows, dtype=torch.int64, device=mask.device)
    width = max(mask[index].sum(1).tolist(), default=0)
    ragged = _ragged_of_rows(batch, index)
    return {
        key: ragged[key] if key in RAGGED else t[index] if t.dim() == 1 else t[index, :width]
        for key, t in batch.items()
    }


def _ragged_of_rows(batch: Batch, index: Tensor) -> Batch:
    found = {
        key: batch[key][segment_entries(batch[sizes], index)]
        for key, sizes in PER_BYTE.items()
        if key in batch
    }
    if "image_count" not in batch:
        return found
    images = segment_entries(batch["image_count"], index)
    found |= {key: batch[key][images] for key in PER_IMAGE & batch.keys()}
    for key in PER_ENTRY.keys() & batch.keys():
        found[key] = batch[key][segment_entries(batch[PER_ENTRY[key]], images)]
    return found


def segment_entries(lengths: Tensor, chosen: Tensor) -> Tensor:
    """Return the positions of the entries of the chosen segments, which lie one after another.

    Args:
        lengths: entries of each segment, int [segments].
        chosen: indices of segments, int64, in any order and number.
    """
    counts = lengths.to(torch.int64)
    begins = counts.cumsum(0) - counts  # of each segment
    sizes = counts[chosen]
    shifts = begins[chosen] - (sizes.cumsum(0) - sizes)  # from a position in the result
    return torch.arange(int(sizes.sum()), device=lengths.device) + shifts.repeat_interleave(sizes)


def sort_canonical(batch: Batch) -> Batch:
    """Order rows by (prompt_id, sample_id), which is the same in every run of a step.

    Raises:
        ValueError: two rows have the same pair, so that their order would be arbitrary.
    """
    pairs = list(zip(batch["prompt_id"].tolist(), batch["sample_id"].tolist(), strict=True))
    if len(set(pairs)) != len(pairs):
        repeated = sorted({pair for pair in pairs if pairs.count(pair) > 1})
        raise ValueError(
            f"rows are not unique by (prompt_id, sample_id): {repeated[:3]} occur more than once"
        )
    return select_rows(batch, sorted(range(len(pairs)), key=pairs.__getitem__))


def pack(batch: Batch) -> Batch:
    """Flatten `[B, T, ...]` to `[tokens, ...]` without padding; add `cu_seqlens`, int32 [B + 1]."""
    lengths = sequence_lengths(batch)
    tokens = lengths.tolist()

    def flattened(padded: Tensor) -> Tensor:
        # Rows are copied, several times faster than selecting by the mask.
        return torch.cat([row[:n] for row, n in zip(padded, tokens, strict=True)] or [padded.flatten(0, 1)])

    flat = {
        key: flattened(t) if t.dim() > 1 and key not in RAGGED else t
        for key, t in batch.items()
        if key != "attention_mask"
    }
    flat["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return flat


def unpack(flat: Batch, width: int | None = None) -> Batch:
    """Invert `pack`: every tensor except those in `PER_ROW` and `RAGGED` is per token.

    `width` is T of the result, by default the longest row.
    """
    cu_seqlens = flat["cu_seqlens"].to(torch.int64)
    lengths = cu_seqlens.diff()  # [B]
    width = int(lengths.max()) if width is None else width
    mask = torch.arange(width, device=lengths.device) < lengths[:, None]  # [B, T]
    batch = {"attention_mask": mask}
    for key, tensor in flat.items():
        if key == "cu_seqlens":
            continue
        batch[key] = tensor if key in PER_ROW | RAGGED else scatter_tokens(tensor, mask)
    return batch


def scatter_tokens(flat: Tensor, mask: Tensor) -> Tensor:
    """Scatter `[tokens, ...]` to the true positions of `mask` [B, T], zeros elsewhere."""
    padded = torch.zeros(*mask.shape, *flat.shape[1:], dtype=flat.dtype, device=flat.device)
    padded[mask.to(flat.device)] = flat
    return padded


def first_fit_decreasing(lengths: Sequence[int], capacity: int, min_groups: int = 1) -> list[list[int]]:
    """Divide indices into groups whose lengths sum to at most `capacity`.

    Groups and their members are returned sorted. Longest first. An item opens a new group while
    there are fewer than `min_groups` or it fits into none; otherwise it goes to the fitting group
    with the fewest members (then the smallest sum), which balances the groups.

    Raises:
        ValueError: one length exceeds the capacity.
    """
    groups: list[list[int]] = []
    sums: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        refuse_too_long(length, capacity)
        fitting = [g for g in range(len(groups)) if sums[g] + length <= capacity]
        if len(groups) < min_groups or not fitting:
            groups.append([index])
            sums.append(length)
        else:
            best = min(fitting, key=lambda g: (len(groups[g]), sums[g]))
            groups[best].append(index)
            sums[best] += length
    return sorted(sorted(group) for group in groups)


def refuse_too_long(length: int, capacity: int) -> None:
    """Raise ValueError for a sequence that fits into no micro-batch."""
    if length > capacity:
        raise ValueError(
            f"a sequence of {length} tokens does not fit into a micro-batch of {capacity}: "
            f"raise mb_spec.max_tokens_per_mb to at least {length}, or shorten prompts or max_new_tokens"
        )


def karmarkar_karp(lengths: Sequence[int], capacity: int, min_groups: int = 1) -> list[list[int]]:
    """Divide indices as `first_fit_decreasing` does, into few groups of nearly equal sums.

    The largest differencing method (N. Karmarkar, R. Karp, 1982): two divisions are merged so that
    the largest group of one joins the smallest of the other, until one is left; those with the
    largest spread come first. Raises as `first_fit_decreasing` does.
    """
    refuse_too_long(max(lengths, default=0), capacity)
    num_groups = max(min_groups, -(-sum(lengths) // capacity), 1)
    while True:
        groups = _differenced(lengths, num_groups)
        if all(total <= capacity for total, _ in groups):
            return sorted(sorted(members) for _, members in groups if members)
        num_groups += 1


def _differenced(lengths: Sequence[int], num_groups: int) -> list[tuple[int, list[int]]]:
    # (minus the spread of its sums, a number, its groups)
    Division = tuple[int, int, list[tuple[int, list[int]]]]
    empty: list[tuple[int, list[int]]] = [(0, [])] * num_groups
    heap: list[Division] = [(-n, i, [*empty[1:], (n, [i])]) for i, n in enumerate(lengths)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, left), (_, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        joined = sorted((a + b, [*x, *y]) for (a, x), (b, y) in zip(left, reversed(right), strict=True))
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], number, joined))
    return heap[0][2] if heap else empty


PACKING = {"ffd": first_fit_decreasing, "kk": karmarkar_karp}


def split_rows(
    lengths: Sequence[int],
    max_tokens: int | None,
    min_groups: int = 1,
    agree_on_max: Callable[[int], int] = lambda count: count,
    *,
    packing: str = "ffd",
    divisor: int = 1,
) -> list[list[int]]:
    """Divide rows into micro-batches, the same number on every rank.

    Args:
        lengths: tokens of each row.
        max_tokens: maximum number of tokens in a micro-batch; None for no limit.
        min_groups: minimum number of micro-batches.
        agree_on_max: returns the maximum of a count over all ranks; a collective that every rank
            calls exactly once.
        packing: one of `PACKING`.
        divisor: the number of micro-batches is a multiple of it.

    Returns:
        Row indices per micro-batch. A rank that needs fewer than another has empty ones at the end:
        the step runs a forward and backward of weight 0 for them, because FSDP's collectives need
        the same number on each rank.
    """
    capacity = max_tokens if max_tokens is not None else max(sum(lengths), 1)
    divide = PACKING[packing]
    groups = divide(lengths, capacity, min_groups)
    if len(groups) % divisor:
        groups = divide(lengths, capacity, -(-len(groups) // divisor) * divisor)
    count = -(-agree_on_max(max(len(groups), min_groups)) // divisor) * divisor
    return groups + [[] for _ in range(count - len(groups))]
