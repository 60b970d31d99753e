"""Rows of different lengths with a cache of keys and values, each from column 0.

A row's keys lie in the columns of its tokens, whatever rows run beside it, so a prefix that was
read before is copied to its place, and sums over keys have one order (`engine/attention.py`). New
tokens are right-aligned: a forward of rows with 2, 1 and 3 new tokens is

    new tokens   . a b    columns   0 1 2 3 4
                 . . c              p p a b
                 d e f              c
                                    p d e f      p: of the prefix, or read before

Padding attends to column 0 and writes to the column after the row's last token, which the next
token overwrites.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from areal_core.data.rows import num_shared
from areal_core.engine.attention import MIN_KEYS
from areal_core.engine.model import cache_argument
from areal_core.engine.sequence_parallel import MIN_ROWS

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
        return max(((num_shared(row, tokens), row) for row in self._rows), default=(0, ()))


def size_bytes(keys_values: KeysValues) -> int:
    return sum(tensor.nbytes for pair in keys_values for tensor in pair)


GROWTH = 64  # columns, and a quarter of those there are, by which the cache grows


class RowCache(Cache):
    """Keys and values [batch, kv_heads, columns, head_dim] of each layer.

    `columns` int64 [batch, new] and `width` are those of the next forward.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__(layers=[])
        self.tensors: list[list[Tensor]] = []
        self.columns = torch.zeros(0)
        self.width = 0
        self._rows = torch.arange(num_rows)[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [batch, kv_heads, new, head_dim]; return all, [.., width, ..]."""
        if layer_idx == len(self.tensors):
            self.tensors.append(
                [state.new_zeros(*state.shape[:2], 0, state.shape[3]) for state in (key_states, value_states)]
            )
        self.reserve(layer_idx)
        pair = self.tensors[layer_idx]
        for held, new in zip(pair, (key_states, value_states), strict=True):
            held[self._rows, :, self.columns] = new.transpose(1, 2)
        return pair[0][:, :, : self.width], pair[1][:, :, : self.width]

    def reserve(self, layer: int) -> None:
        """Make room for `width` columns; new ones are 0, as masked columns must be finite."""
        pair = self.tensors[layer]
        missing = self.width - pair[0].shape[2]
        if missing > 0:
            more = max(missing, GROWTH + pair[0].shape[2] // 4)
            self.tensors[layer] = [torch.nn.functional.pad(held, (0, 0, 0, more)) for held in pair]

    def write_prefix(self, row: int, prefix: KeysValues) -> None:
        for layer, pair in enumerate(prefix):
            if layer == len(self.tensors):
                shape = (len(self._rows), pair[0].shape[0], 0)
                self.tensors.append([part.new_zeros(*shape, part.shape[2]) for part in pair])
            self.reserve(layer)
            for held, part in zip(self.tensors[layer], pair, strict=True):
                held[row, :, : part.shape[1]] = part

    def read(self, row: int, first: int, last: int) -> KeysValues:
        """Return copies of the keys and values of a row's tokens [first, last)."""
        return [(k[row, :, first:last].clone(), v[row, :, first:last].clone()) for k, v in self.tensors]

    def select(self, rows: Tensor) -> None:
        """Keep these rows only."""
        self.tensors = [[held[rows] for held in pair] for pair in self.tensors]
        self._rows = torch.arange(len(rows))[:, None]


class CachedRows:
    """Rows of a model whose only state is keys and values, see `generate.RunningRows`.

    Args:
        prompts: not empty.
        prefixes: what was read before; rows are added to it when they leave.
        is_invariant: compute at least `MIN_ROWS` rows in every product.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        prefixes: PrefixCache,
        *,
        is_invariant: bool,
    ) -> None:
        self._model, self._prefixes, self._is_invariant = model, prefixes, is_invariant
        self._epoch = prefixes.epoch
        self._cache = RowCache(len(prompts))
        # The last token of a prompt is always read: sampling needs its logits.
        found = [prefixes.match(prompt[:-1]) for prompt in prompts]
        self.cached_tokens = [prefix[0][0].shape[1] if prefix else 0 for prefix in found]
        self._cache.width = max(self.cached_tokens)
        for row, prefix in enumerate(found):
            self._cache.write_prefix(row, prefix)
        known = list(zip(prompts, self.cached_tokens, strict=True))
        self._tokens = [list(prompt[:count]) for prompt, count in known]
        self._read([list(prompt[count:]) for prompt, count in known], [True] * len(prompts))

    def read(self, tokens: Tensor, running: Sequence[bool]) -> None:
        """Read the next token of each row, int64 [batch]; those of rows not running are ignored."""
        self._read([[token] for token in tokens.tolist()], running)

    def _read(self, new: list[list[int]], running: Sequence[bool]) -> None:
        """Read new tokens of each row; where `running` is false their columns stay free."""
        width = max(map(len, new))
        if self._is_invariant:
            width = max(width, -(-MIN_ROWS // len(new)))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in new])
        lengths = torch.tensor([len(row) for row in self._tokens])[:, None]
        counts = torch.tensor([len(row) for row in new])[:, None]
        offsets = torch.arange(width) - (width - counts)  # [batch, width], negative on padding
        positions = (lengths + offsets).where(offsets >= 0, 0)
        cache, device = self._cache, self._model.device
        cache.columns = positions.where(offsets >= 0, lengths + counts).to(device)
        num_columns = int((lengths + counts).max()) + 1
        cache.width = -(-num_columns // MIN_KEYS) * MIN_KEYS
        allowed = torch.arange(cache.width) <= positions[..., None]
        self.logits: Tensor = self._model(
            input_ids=ids.to(device),
            attention_mask=allowed[:, None].to(device),
            position_ids=positions.to(device),
            **{cache_argument(type(self._model).forward): cache},
            use_cache=True,
            logits_to_keep=-(-MIN_ROWS // len(new)) if self._is_invariant else 1,
        ).logits[:, -1]
        for held, row, is_running in zip(self._tokens, new, running, strict=True):
            if is_running:
                held += row

    def select(self, rows: Tensor) -> None:
        """Keep these rows, int64 indices, which may repeat; the others go to the prefix cache."""
        kept = rows.tolist()
        self._keep(set(range(len(self._tokens))) - set(kept))
        self._tokens = [list(self._tokens[row]) for row in kept]
        self.cached_tokens = [self.cached_tokens[row] for row in kept]
        self.logits = self.logits[rows]
        self._cache.select(rows)

    def experts_of(self, row: int) -> None:
        """Return None: experts are kept with padded rows only."""

    def close(self) -> None:
        """End all rows; they go to the prefix cache."""
        self._keep(range(len(self._tokens)))

    def _keep(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._prefixes.insert(self._tokens[row], partial(self._cache.read, row), self._epoch)
