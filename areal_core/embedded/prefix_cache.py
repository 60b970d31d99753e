"""A radix tree of the keys and values of token sequences that a model has read.

```
root ── "system prompt" ──┬── "question 1, answer a"
                          └── "question 2" ──┬── "answer b"
                                             └── "answer c, next turn"
```

An edge holds a run of tokens with their keys and values, so a shared beginning is stored once. They
follow from the weights, adapters that are merged into them included: whoever writes to the weights
calls `clear`. Rows that began before that are refused by their epoch. Pictures are not part of
the tokens: rows with pictures must not be inserted.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Keys and values of each layer, [kv_heads, tokens, head_dim].
KeysValues = list[tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Node:
    """A run of tokens; `children` are found by their first token."""

    tokens: tuple[int, ...]
    keys_values: KeysValues
    parent: "Node | None"
    children: "dict[int, Node]" = field(default_factory=dict)

    def size_bytes(self) -> int:
        """Return the memory of the keys and values."""
        return sum(tensor.nbytes for pair in self.keys_values for tensor in pair)


class PrefixCache:
    """The tree, of at most `max_bytes`; the leaf that was used longest ago is dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.epoch = 0  # number of times that it was cleared
        self._root = Node((), [], None)
        # All nodes but the root, used longest ago first, each before its parent.
        self._by_use: OrderedDict[Node, None] = OrderedDict()

    def clear(self) -> None:
        """Drop everything, because the weights have changed."""
        self.epoch += 1
        self.size_bytes = 0
        self._root = Node((), [], None)
        self._by_use.clear()

    def match(self, tokens: Sequence[int]) -> KeysValues:
        """Return the keys and values of the longest beginning that is here; empty if there is none.

        They are to be copied, not written to.
        """
        path = self._walk(tokens)
        return [
            (
                torch.cat([node.keys_values[layer][0][:, :count] for node, count in path], dim=1),
                torch.cat([node.keys_values[layer][1][:, :count] for node, count in path], dim=1),
            )
            for layer in range(len(path[0][0].keys_values) if path else 0)
        ]

    def insert(
        self, tokens: Sequence[int], keys_values: Callable[[int, int], KeysValues], epoch: int
    ) -> None:
        """Add a row.

        Args:
            keys_values: returns copies of those of a range of tokens, [first, last).
            epoch: of the cache when the row began; a row of an earlier one is not added.
        """
        if epoch != self.epoch or self.max_bytes == 0:
            return
        node, known = self._root, 0
        for found, count in self._walk(tokens):
            known += count
            node = found if count == len(found.tokens) else self._split(found, count)
        if known < len(tokens):
            rest = tuple(tokens[known:])
            leaf = Node(rest, keys_values(known, len(tokens)), node)
            node.children[rest[0]] = leaf
            self._mark(leaf)
            self.size_bytes += leaf.size_bytes()
            self._evict()

    def _walk(self, tokens: Sequence[int]) -> list[tuple[Node, int]]:
        """Return the nodes along a row, each with its number of matching tokens; mark them."""
        path: list[tuple[Node, int]] = []
        node, place = self._root, 0
        while place < len(tokens) and (child := node.children.get(tokens[place])) is not None:
            count = _common(child.tokens, tokens[place : place + len(child.tokens)])
            path.append((child, count))
            place += count
            if count < len(child.tokens):
                break
            node = child
        if path:
            self._mark(path[-1][0])
        return path

    def _mark(self, node: Node) -> None:
        while node.parent is not None:
            self._by_use[node] = None
            self._by_use.move_to_end(node)
            node = node.parent

    def _split(self, node: Node, count: int) -> Node:
        assert node.parent is not None
        first = Node(
            node.tokens[:count],
            [(keys[:, :count].clone(), values[:, :count].clone()) for keys, values in node.keys_values],
            node.parent,
            {node.tokens[count]: node},
        )
        node.parent.children[first.tokens[0]] = first
        node.tokens, node.parent = node.tokens[count:], first
        node.keys_values = [
            (keys[:, count:].clone(), values[:, count:].clone()) for keys, values in node.keys_values
        ]
        self._mark(first)
        return first

    def _evict(self) -> None:
        while self.size_bytes > self.max_bytes:
            leaf, _ = self._by_use.popitem(last=False)
            assert leaf.parent is not None
            del leaf.parent.children[leaf.tokens[0]]
            self.size_bytes -= leaf.size_bytes()


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    if tuple(left) == tuple(right):
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))
