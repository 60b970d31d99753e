"""Differences by position, turn, version, token and every other column, to locate a mismatch."""

from dataclasses import dataclass

import numpy as np

from consistency.estimators import k3
from consistency.tokens import Floats, Ints, TokenTable

NUM_BINS = 40


@dataclass(frozen=True)
class Group:
    """Size and differences of a group of tokens."""

    key: int | str
    num_tokens: int
    mean_abs: float
    mean: float
    k1: float
    k2: float
    k3: float


def group_by(keys: Ints, difference: Floats) -> tuple[Group, ...]:
    """Compute the differences of each key, ascending."""
    names, inverse = np.unique(keys, return_inverse=True)
    count = np.bincount(inverse)
    means = [
        np.bincount(inverse, weights=v) / count
        for v in (np.abs(difference), difference, difference**2, k3(difference))
    ]
    return tuple(
        Group(int(key), int(num), float(size), float(mean), float(-mean), float(square / 2), float(k3_mean))
        for key, num, size, mean, square, k3_mean in zip(names, count, *means, strict=True)
    )


def bins(values: Ints, num_bins: int = NUM_BINS) -> Ints:
    """Return the first value of each value's bin; bins have equal width, 1 while values are few."""
    width = max(1, -(-int(values.max() + 1) // num_bins))
    return values // width * width


def all_groups(table: TokenTable) -> dict[str, tuple[Group, ...]]:
    """Group by position, by every recorded column, and by the 50 most frequent token ids."""
    difference = table.difference
    decile = np.searchsorted(np.quantile(-table.trainer, np.arange(0.1, 1.0, 0.1)), -table.trainer)
    columns = {
        "position": bins(table.position),
        "response_position": bins(table.response_position),
        "turn_position": bins(table.turn_position),
        "turn": table.turn,
        "length": bins(table.length, 10),
        "surprisal_decile": decile.astype(np.int64),
        "version": table.version,
        "worker": table.worker,
        "cached": None if table.cached_tokens is None else (table.cached_tokens > 0).astype(np.int64),
    }
    groups = {name: group_by(keys, difference) for name, keys in columns.items() if keys is not None}
    by_id = group_by(table.token_id, difference)
    groups["token_id"] = tuple(sorted(by_id, key=lambda group: (-group.num_tokens, group.key))[:50])
    return groups


def histogram(difference: Floats, num_bins: int = 41) -> tuple[tuple[float, int], ...]:
    """Count tokens in equal bins of D up to the 99th percentile of |D|; the outer bins are open.

    Returns:
        (left edge, number of tokens) of each bin.
    """
    reach = float(np.quantile(np.abs(difference), 0.99)) or 1.0
    edges = np.linspace(-reach, reach, num_bins + 1)
    counts, _ = np.histogram(np.clip(difference, -reach, reach), edges)
    return tuple((float(edge), int(count)) for edge, count in zip(edges[:-1], counts, strict=True))
