"""The order of prompts: the same for every number of ranks, and exactly resumable."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from areal_core.data.rows import Row
from areal_core.errors import DatasetError


@dataclass(frozen=True)
class PromptOrder:
    """Everything that the global order of prompts depends on; not the number of ranks."""

    num_rows: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the data."""
        full, rest = divmod(self.num_rows, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    @property
    def rows_per_epoch(self) -> int:
        """Rows in one pass over the data; an incomplete last batch counts only if it is kept."""
        return min(self.steps_per_epoch * self.batch_size, self.num_rows)

    def prompt_ids(self, batch: int) -> range:
        """Return the prompt ids of a global batch, which is counted from the start of the run.

        Data-parallel rank r takes every num_ranks-th of them, starting at r.
        """
        epoch, batch = divmod(batch, self.steps_per_epoch)
        first, start = epoch * self.rows_per_epoch, batch * self.batch_size
        return range(first + start, first + min(start + self.batch_size, self.num_rows))


class PromptLoader:
    """Provides this rank's share of global batches of `batch_size` prompts, epoch after epoch.

    Every epoch has its own permutation, drawn from `seed` and the number of the epoch alone.
    Data-parallel rank r takes rows r, r + num_ranks, ... of each global batch. `prompt_id` is the
    position in the run's global order: it identifies the group, and never repeats.

    Raises:
        DatasetError: `batch_size` is larger than the dataset or not a multiple of `num_ranks`.
    """

    def __init__(
        self,
        dataset: Sequence[Row],
        batch_size: int,
        rank: int = 0,
        num_ranks: int = 1,
        shuffle: bool = True,
        seed: int = 1,
        drop_last: bool = True,
    ) -> None:
        if batch_size > len(dataset):
            raise DatasetError(
                f"batch_size is {batch_size} and the dataset has {len(dataset)} rows; no batch could ever be filled"
            )
        if batch_size < 1 or batch_size % num_ranks:
            raise DatasetError(
                f"batch_size is {batch_size} and there are {num_ranks} data-parallel ranks; it must be a multiple"
            )
        self.dataset, self.rank, self.num_ranks = dataset, rank, num_ranks
        self.order = PromptOrder(len(dataset), batch_size, shuffle, seed, drop_last)
        self.num_batches = 0  # provided since the start of the run
        self._permutation: tuple[int, list[int]] = (-1, [])

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the data."""
        return self.order.steps_per_epoch

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self.num_batches // self.steps_per_epoch

    def next_batch(self) -> list[tuple[int, Row]]:
        """Return this rank's (prompt_id, row) pairs of the next global batch, in global order."""
        ids = self.order.prompt_ids(self.num_batches)[self.rank :: self.num_ranks]
        self.num_batches += 1
        return [(prompt_id, self.row(prompt_id)) for prompt_id in ids]

    def row(self, prompt_id: int) -> Row:
        """Return the row of a prompt, of any rank and epoch."""
        epoch, position = divmod(prompt_id, self.order.rows_per_epoch)
        return self.dataset[self._permutation_of(epoch)[position]]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what the order depends on, in JSON types; equal on all ranks."""
        return {"num_batches": self.num_batches, **asdict(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`. Raises DatasetError if its order is another."""
        for name, ours in asdict(self.order).items():
            if state[name] != ours:
                raise DatasetError(
                    f"the saved loader has {name} {state[name]} and this one {ours}; their orders differ"
                )
        self.num_batches = int(state["num_batches"])

    def _permutation_of(self, epoch: int) -> list[int]:
        if self._permutation[0] != epoch:
            rows = list(range(self.order.num_rows))
            if self.order.shuffle:
                random.Random(f"{self.order.seed}/{epoch}").shuffle(rows)
            self._permutation = (epoch, rows)
        return self._permutation[1]
