"""Keys and values of token sequences that a model has read, to be read once.

They follow from the weights, merged adapters included: whoever writes to the weights calls `clear`.
Rows that began before that are refused by their epoch. Pictures are not part of the tokens: rows
with pictures must not be inserted.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor

# Keys and values of each layer, [kv_heads, tokens, head_dim].
KeysValues = list[tuple[Tensor, Tensor]]


class PrefixCache:
    """Rows of at most `max_bytes`; the one that was used longest ago is dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.epoch = 0  # number of times that it was cleared
        self._rows: OrderedDict[tuple[int, ...], KeysValues] = OrderedDict()  # used longest ago first

    def clear(self) -> None:
        """Drop everything, because the weights have changed."""
        self.epoch += 1
        self.size_bytes = 0
        self._rows.clear()

    def match(self, tokens: Sequence[int]) -> KeysValues:
        """Return the keys and values of the longest beginning that is here; empty if there is none.

        They are to be copied, not written to.
        """
        count, row = self._longest(tuple(tokens))
        if count == 0:
            return []
        self._rows.move_to_end(row)
        return [(keys[:, :count], values[:, :count]) for keys, values in self._rows[row]]

    def insert(
        self, tokens: Sequence[int], keys_values: Callable[[int, int], KeysValues], epoch: int
    ) -> None:
        """Add a row, in place of the one that it continues.

        Args:
            keys_values: returns copies of those of a range of tokens, [first, last).
            epoch: of the cache when the row began; a row of an earlier one is not added.
        """
        row = tuple(tokens)
        if epoch != self.epoch or self.max_bytes == 0 or not row:
            return
        count, known = self._longest(row)
        if count == len(row):
            self._rows.move_to_end(known)
            return
        if count and count == len(known):
            self.size_bytes -= size_bytes(self._rows.pop(known))
        self._rows[row] = keys_values(0, len(row))
        self.size_bytes += size_bytes(self._rows[row])
        while self.size_bytes > self.max_bytes:
            self.size_bytes -= size_bytes(self._rows.popitem(last=False)[1])

    def _longest(self, tokens: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        return max(((common(row, tokens), row) for row in self._rows), default=(0, ()))


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Return how many tokens two rows begin with in common."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    return next(place for place in range(size) if left[place] != right[place])


def size_bytes(keys_values: KeysValues) -> int:
    return sum(tensor.nbytes for pair in keys_values for tensor in pair)
