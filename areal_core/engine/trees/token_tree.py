"""The tree of a micro-batch's rows: tokens that rows begin with in common are in it once.

```
rows        a b c d        tree     a b c d       segments  a b c d | e f | g h
            a b e f                   └ e f       depths    0 1 2 3 | 2 3 | 0 1
            g h                     g h           e f attends to a b and to itself
```

Rows are sorted by their tokens, so a row shares with the row before it what it shares with any
earlier one. The tokens that it adds are its segment. A segment attends to the tokens of its own row
before it, which lie in a few contiguous blocks of the tree.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from areal_core.data.batch import Batch, sequence_lengths
from areal_core.data.rows import num_shared
from areal_core.engine.attention import KeyBlocks

Row = list[int]


@dataclass(frozen=True)
class TokenTree:
    """The distinct tokens of some rows. A token is distinct if its row differs up to it.

    Args:
        tokens: int64 [distinct], segment by segment.
        depths: the position of each in its rows, int64 [distinct].
        nodes: where each row's tokens are in `tokens`, a tensor [length] per row in given order.
        segments: the number of tokens of each segment.
        owners: of each segment, the index of the row that it completes.
    """

    tokens: Tensor
    depths: Tensor
    nodes: list[Tensor]
    segments: list[int]
    owners: list[int]

    @cached_property
    def key_blocks(self) -> KeyBlocks:
        """The blocks of tokens that each segment attends to."""
        num_tokens = len(self.tokens)
        is_start = torch.zeros(num_tokens + 1, dtype=torch.bool)
        for owner in self.owners:
            path = self.nodes[owner]
            jumps = (path.diff() != 1).nonzero()[:, 0]
            # A block ends where a path leaves it, and begins where one enters it.
            is_start[torch.cat([path[:1], path[jumps] + 1, path[jumps + 1], path[-1:] + 1])] = True
        starts = is_start.nonzero()[:, 0]
        block_of = is_start[:-1].cumsum(0) - 1  # [distinct]
        paths = [block_of[self.nodes[owner]].unique_consecutive().tolist() for owner in self.owners]
        return KeyBlocks(starts.diff().tolist(), paths)


def build_tree(rows: list[Row]) -> TokenTree:
    """Build the tree of at least one row; no row is empty."""
    nodes: list[Tensor] = [torch.empty(0)] * len(rows)
    tokens, depths, segments, owners = [], [], [], []
    path, size = torch.empty(0, dtype=torch.int64), 0
    for index, row, shared in sorted_with_shared(rows):
        added = len(row) - shared
        path = torch.cat([path[:shared], torch.arange(size, size + added)])
        nodes[index] = path
        if added:
            tokens.append(torch.tensor(row[shared:]))
            depths.append(torch.arange(shared, len(row)))
            segments.append(added)
            owners.append(index)
            size += added
    return TokenTree(torch.cat(tokens), torch.cat(depths), nodes, segments, owners)


def count_distinct(rows: list[Row]) -> int:
    return sum(len(row) - shared for _, row, shared in sorted_with_shared(rows))


def sorted_with_shared(rows: list[Row]) -> list[tuple[int, Row, int]]:
    order = sorted(range(len(rows)), key=lambda index: (rows[index], index))
    pairs = zip([None, *order], order, strict=False)
    return [(i, rows[i], 0 if last is None else num_shared(rows[last], rows[i])) for last, i in pairs]


def rows_of(batch: Batch) -> list[Row]:
    """Return the tokens of each row, without padding."""
    lengths = sequence_lengths(batch).tolist()
    return [row[:n] for row, n in zip(batch["input_ids"].tolist(), lengths, strict=True)]


def units_of_groups(batch: Batch, units: list[list[int]], capacity: int | None) -> list[list[int]]:
    """Join consecutive units of rows of one prompt, as far as their tree fits.

    Args:
        batch: with `prompt_id`; without it nothing is joined.
        units: rows that stay together, in order.
        capacity: tokens of the largest tree; None for no limit.
    """
    if "prompt_id" not in batch:
        return units
    prompts, rows = batch["prompt_id"].tolist(), rows_of(batch)
    joined: list[list[int]] = []
    for unit in units:
        same = bool(joined) and prompts[joined[-1][0]] == prompts[unit[0]]
        together = [*joined[-1], *unit] if same else unit
        if same and (capacity is None or count_distinct([rows[row] for row in together]) <= capacity):
            joined[-1] = together
        else:
            joined.append(unit)
    return joined
