"""The rows of a tensor that two recordings of a step share, as numbers side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from recorder import RecordedStep
from recorder.format import TensorEntry
from replayer.stages import (
    Foreign,
    StageDifference,
    bits,
    files,
    find_rows,
    match_rows,
    side_of,
    tensor_entries,
)

# tokens and names: numbers whose size means nothing; and floats of which NumPy knows the bits only
CATEGORIES = frozenset({"input_ids", "finish_reason", "episode", "branch", "parent_turn", "failure"})
OPAQUE = frozenset({"F8_E4M3", "F8_E5M2"})
# relative distance of two neighbouring numbers
EPSILON = {"F16": 2.0**-10, "BF16": 2.0**-7, "F32": 2.0**-23, "F64": 2.0**-52}


@dataclass(frozen=True)
class RowPair:
    """A row of both sides: its values from token 0, of a value per row only one.

    `left` and `right` are [length] and may differ in length; `known` and `differs`, bool, cover
    their common length.
    """

    rank: int
    row: int
    prompt_id: int
    sample_id: int
    left: np.ndarray
    right: np.ndarray
    known: np.ndarray
    differs: np.ndarray

    @property
    def is_equal(self) -> bool:
        """True if both have the same values, as far as they are known."""
        return not self.differs.any() and len(self.left) == len(self.right)

    def begin(self, length: int) -> "RowPair":
        """Return the first values of the row only."""
        return replace(
            self,
            left=self.left[:length],
            right=self.right[:length],
            known=self.known[:length],
            differs=self.differs[:length],
        )


@dataclass(frozen=True)
class Pairs:
    """All rows of a tensor that both sides have, in the left side's order.

    `epsilon` is the relative distance of two neighbouring floats, 0.0 for integers; `is_category`
    if sizes mean nothing; `in_prompt` if the rows are cut to their prompts.
    """

    rows: Sequence[RowPair]
    epsilon: float
    is_category: bool
    per_token: bool
    in_prompt: bool
    num_ranks: int


def read_pairs(
    left: RecordedStep, right: RecordedStep, difference: StageDifference, foreign: Foreign
) -> Pairs | None:
    """Read the tensor of a difference from both recordings of a step.

    None if it is no tensor of numbers that both have. Raises DamagedRecord.
    """
    kind, key = "batch" if difference.stage == "batch" else "learning", difference.name
    here, there = files(left, kind), files(right, kind)
    if not here or not there:
        return None
    entries = [*tensor_entries(here, key), *tensor_entries(there, key)]
    if any(entry is None or len(entry.shape) != 1 or entry.axis == "offset" for entry in entries):
        return None
    one, other = tensor_entries(here, key)[0], tensor_entries(there, key)[0]
    assert one is not None
    assert other is not None
    if any(foreign):
        rows, other_rows = match_rows(left, right)
    else:
        rows, other_rows = find_rows(left), find_rows(right)
    a = side_of(left, here, rows, key, foreign[0])
    b = side_of(right, there, other_rows, key, foreign[1])
    per_token = one.axis == "token"
    in_prompt = key == "input_ids" and difference.place is not None and difference.place.in_prompt
    found = []
    for name in (name for name in rows if name in other_rows):
        values = a.values(name, per_token), b.values(name, per_token)
        if values[0] is None or values[1] is None:
            continue
        row = rows[name]
        pair = pair_of(row.rank, row.row, name, values[0], values[1], one.dtype == other.dtype)
        shared = len(pair.known)
        unknown = a.unknown(values[0])[:shared] | b.unknown(values[1])[:shared]
        pair = replace(
            pair,
            left=numbers(values[0], one),
            right=numbers(values[1], other),
            known=~unknown,
            differs=pair.differs & ~unknown,
        )
        if in_prompt:  # completions of other prompts are others, too
            pair = pair.begin(row.prompt_length)
        found.append(pair)
    dtypes = {one.dtype, other.dtype}
    return Pairs(
        rows=found,
        epsilon=max(EPSILON.get(dtype, 0.0) for dtype in dtypes),
        is_category=key in CATEGORIES or bool(dtypes & OPAQUE),
        per_token=per_token,
        in_prompt=in_prompt,
        num_ranks=left.manifest.num_ranks if left.manifest.num_ranks == right.manifest.num_ranks else 1,
    )


def pair_of(
    rank: int, row: int, name: tuple[int, int], left: np.ndarray, right: np.ndarray, same_dtype: bool = True
) -> RowPair:
    """Return two rows of known values as a pair; `name` is (prompt_id, sample_id)."""
    shared = min(len(left), len(right))
    a, b = left[:shared], right[:shared]
    differs = bits(a) != bits(b) if same_dtype else a != b
    return RowPair(rank, row, *name, left, right, np.ones(shared, bool), differs)


def numbers(values: np.ndarray, entry: TensorEntry) -> np.ndarray:
    """Return the values as float64 or int64; bfloat16 from its bits."""
    if entry.dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
