"""Recognise how B's values follow from A's, from the rows that differ.

A relation must hold in every value that differs, and must not be explained by chance: a factor or
an offset needs three distinct values, a shift values that it alone explains.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from recorder import RecordedStep
from recorder.format import TensorEntry
from recorder.tables.columns import numbers_of
from replayer.compare.stages import (
    Foreign,
    StageDifference,
    bits,
    files,
    paired_rows,
    sides_of,
    tensor_entries,
)

MIN_DISTINCT = 3  # distinct values: two numbers always have a common factor, and a common difference
MIN_UNRELATED = 8  # values: fewer may differ in all of them by chance


@dataclass(frozen=True)
class Pattern:
    """How B's values follow from A's.

    `kind` names the relation, or the place; `why` a phrase with the numbers; `value` the shift, factor, offset, or
    number of rows.
    """

    kind: str
    why: str
    value: float | None = None


def count(number: int, noun: str) -> str:
    """Return `1 row`, `2 rows`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def listed(names: Sequence[str], limit: int = 3) -> str:
    """Join names with commas; of many, `limit` and a count of the rest."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


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
    rows, other_rows = paired = paired_rows(left, right, foreign)
    a, b = sides_of((left, right), kind, key, paired, foreign)
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
    values = numbers_of(values, entry)
    return values.astype(np.float64 if values.dtype.kind == "f" else np.int64)


LARGEST_SHIFT = 8  # tokens or rows
ABOUT = 1e-3  # relative error of a relation beside a small addend, such as a KL penalty
ULPS = 64  # by which two values that are computed in another order may differ
BFLOAT16 = 2.0**-8  # half the distance of two neighbours, relative
CLOSE = 2.0**-5  # largest difference that rounding of bfloat16 explains, relative to all values
MIN_ROUNDED = 8
UNRELATED = 0.3  # largest correlation of values that have nothing to do with each other


def relate(pairs: Pairs, rows: Sequence[RowPair]) -> Pattern | None:
    """Return the relation of the rows that differ, None if there is none to name."""
    if pairs.is_category:
        whole = other_prompts(pairs) if pairs.in_prompt else None
        return shifted(pairs, rows) or whole or permuted(pairs, rows) or other_values(rows)
    return (
        not_finite(rows)
        or shifted(pairs, rows)
        or scaled(pairs, rows)
        or offset(pairs, rows)
        or permuted(pairs, rows)
        or other_support(rows)
        or rounding(pairs, rows)
        or unrelated(rows)
    )


def not_finite(rows: Sequence[RowPair]) -> Pattern | None:
    """Recognise NaN and infinity on one side only."""
    left, right = differing(rows)
    bad = [~np.isfinite(values) for values in (left, right)]
    only = [int((bad[0] & ~bad[1]).sum()), int((bad[1] & ~bad[0]).sum())]
    if not any(only):
        return None
    side = "B" if only[1] >= only[0] else "A"
    return Pattern(
        "not finite", f"{max(only)} of {len(left)} values that differ are not finite in {side} only"
    )


def shifted(pairs: Pairs, rows: Sequence[RowPair]) -> Pattern | None:
    """Recognise rows that are those of A, moved by the same number of tokens or rows."""
    if not pairs.per_token:
        rows, noun = [as_one_row(pairs)], "row"
    else:
        noun = "token"
    for size in range(1, LARGEST_SHIFT + 1):
        for shift in (size, -size):
            explained = [explained_by(shift, row) for row in rows]
            if all(number is not None for number in explained) and is_enough(
                [number or 0 for number in explained], rows
            ):
                return Pattern(
                    "shifted",
                    f"B is A moved by {count(size, noun)} {'later' if shift > 0 else 'earlier'} in "
                    f"{sum(map(bool, explained))} of {len(rows)} rows",
                    float(shift),
                )
    return None


def as_one_row(pairs: Pairs) -> RowPair:
    left, right, known, differs = (
        np.concatenate([getattr(row, name) for row in pairs.rows])
        for name in ("left", "right", "known", "differs")
    )
    return RowPair(0, 0, 0, 0, left, right, known, differs)


def explained_by(shift: int, row: RowPair) -> int | None:
    """Return how many differing values a shift explains, None if one contradicts it.

    The shift is from the first value that differs on: before it, nothing is moved. Only what is at
    most `shift` from that one or from the end may be anything.
    """
    left, right = row.left, row.right
    first = int(np.flatnonzero(row.differs)[0]) if row.differs.any() else len(row.differs)
    begin, end = max(0, shift) + first, min(len(right), len(left) + shift)
    if 2 * (end - begin) < min(len(left), len(right)) - first:
        return None  # too little is compared
    a, b = left[begin - shift : end - shift], right[begin:end]
    known = known_at(row, np.arange(begin, end)) & known_at(row, np.arange(begin - shift, end - shift))
    if (~same(a, b) & known).any():
        return None
    if not a.any():
        return 0  # every shift explains zeros
    inside = row.differs[begin : min(end, len(row.differs))]
    return int((inside & known[: len(inside)]).sum())


def known_at(row: RowPair, places: np.ndarray) -> np.ndarray:
    """Return whether the values at places are known; beyond the common length they are."""
    padded = np.ones(max(len(row.left), len(row.right)), bool)
    padded[: len(row.known)] = row.known
    return padded[places]


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return where values are equal; NaN equals NaN."""
    return (a == b) | ((a != a) & (b != b))


def is_enough(explained: Sequence[int], rows: Sequence[RowPair]) -> bool:
    """Return whether so many explained values of each row cannot be chance.

    Of a single row, several distinct values have to fit; of a mask, several rows.
    """
    distinct = [len(np.unique(row.left[: len(row.differs)][row.differs])) for row in rows]
    with_evidence = [d for number, d in zip(explained, distinct, strict=True) if number]
    if len(with_evidence) < max(1, len(rows) // 2):
        return False
    total = sum(explained)
    return (len(with_evidence) >= 3 and total >= 3) or (total >= 4 and max(with_evidence) >= MIN_DISTINCT)


def differing(rows: Sequence[RowPair]) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of both sides that differ and are known, one array each; 0.0 is -0.0."""
    left, right = [np.zeros(0)], [np.zeros(0)]
    for row in rows:
        shared = len(row.differs)
        where = row.differs & (row.left[:shared] != row.right[:shared])
        left.append(row.left[:shared][where])
        right.append(row.right[:shared][where])
    return np.concatenate(left), np.concatenate(right)


def has_same_lengths(rows: Sequence[RowPair]) -> bool:
    return all(len(row.left) == len(row.right) for row in rows)


def distinct_sizes(values: np.ndarray, tolerance: float) -> int:
    ordered = np.sort(values)
    gaps = np.diff(ordered) > tolerance * np.maximum(np.abs(ordered[1:]), np.abs(ordered[:-1]))
    return int(gaps.sum()) + 1 if len(ordered) else 0


def scaled(pairs: Pairs, rows: Sequence[RowPair]) -> Pattern | None:
    """Recognise a constant factor, which may be negative, in every value that differs."""
    left, right = differing(rows)
    if not has_same_lengths(rows) or not len(left) or (left == 0).any() or (right == 0).any():
        return None
    factor = float(np.median(right / left))
    error = float((np.abs(right - factor * left) / np.abs(right)).max())
    about = exactness(pairs, error, len(left))
    if about is None or abs(factor - 1) <= 10 * about:
        return None
    if distinct_sizes(np.abs(left), 2 * about) < MIN_DISTINCT:
        return None
    return Pattern("scaled", f"B is {known_digits(factor, about)} x A in {counted(rows, left)}", factor)


def offset(pairs: Pairs, rows: Sequence[RowPair]) -> Pattern | None:
    """Recognise a constant that is added to every value that differs."""
    left, right = differing(rows)
    if not has_same_lengths(rows) or not len(left):
        return None
    added = float(np.median(right - left))
    sizes = np.maximum(np.maximum(np.abs(left), np.abs(right)), abs(added))
    error = float((np.abs(right - left - added) / sizes).max())
    about = exactness(pairs, error, len(left))
    if about is None or abs(added) <= 10 * about * float(sizes.max()):
        return None
    if distinct_sizes(left, 2 * about) < MIN_DISTINCT:
        return None
    sign = "+" if added > 0 else "-"
    return Pattern(
        "offset", f"B is A {sign} {known_digits(abs(added), about)} in {counted(rows, left)}", added
    )


def known_digits(number: float, tolerance: float) -> str:
    return f"about {number:.3g}" if tolerance == ABOUT else f"{number:.6g}"


def exactness(pairs: Pairs, error: float, num_values: int) -> float | None:
    """Return how exactly a relation with a largest relative error holds; None if it does not.

    It holds up to rounding; or about, if enough values agree that a small addend explains the rest.
    """
    if error <= ULPS * pairs.epsilon:
        return ULPS * pairs.epsilon
    if error <= ABOUT and num_values >= MIN_UNRELATED and pairs.epsilon:
        return ABOUT
    return None


def counted(rows: Sequence[RowPair], differing_values: np.ndarray) -> str:
    """Return `16 of 16 values that differ; 120 are equal`."""
    number = len(differing_values)
    equal = sum(int(row.known.sum()) for row in rows) - number
    return f"{number} of {number} values that differ" + (f"; {equal} are equal" if equal else "")


def permuted(pairs: Pairs, rows: Sequence[RowPair]) -> Pattern | None:
    """Recognise the same values at other places: within each row, or rows that are exchanged."""
    if not pairs.per_token:
        return exchanged_values(pairs)
    if not has_same_lengths(rows) or not all(row.known.all() for row in rows):
        return None
    left, _ = differing(rows)
    if len(left) > MIN_DISTINCT and all(
        len(np.unique(row.left[row.differs])) >= MIN_DISTINCT
        and np.array_equal(np.sort(row.left), np.sort(row.right))
        for row in rows
    ):
        is_reversed = all(np.array_equal(row.left, row.right[::-1]) for row in rows)
        how = "reversed" if is_reversed else "in another order"
        return Pattern("permuted", f"the values of {count(len(rows), 'row')} are the same, {how}", len(left))
    contents = [
        Counter(side.tobytes() for side in sides)
        for sides in zip(*((r.left, r.right) for r in rows), strict=True)
    ]
    if (
        len(rows) > 1
        and contents[0] == contents[1]
        and len(contents[0]) > 1
        and len(np.unique(left)) >= MIN_DISTINCT
    ):
        return Pattern("permuted", f"{len(rows)} rows have the values of one another", len(rows))
    return None


def exchanged_values(pairs: Pairs) -> Pattern | None:
    whole = as_one_row(pairs)
    left = whole.left[whole.differs]
    if len(left) <= MIN_DISTINCT or len(np.unique(left)) < MIN_DISTINCT or not whole.known.all():
        return None
    if not np.array_equal(np.sort(whole.left), np.sort(whole.right)):
        return None
    groups = {row.prompt_id for row in pairs.rows}
    sides = [
        {
            group: sorted(float(getattr(row, side)[0]) for row in pairs.rows if row.prompt_id == group)
            for group in groups
        }
        for side in ("left", "right")
    ]
    where = " of the same prompt" if sides[0] == sides[1] else ""
    return Pattern("permuted", f"{len(left)} rows have the values of other rows{where}", len(left))


def other_support(rows: Sequence[RowPair]) -> Pattern | None:
    """Recognise values that are 0 at other tokens: another mask."""
    if not has_same_lengths(rows):
        return None
    only = [0, 0]  # not 0 in A only, in B only
    both, changed = 0, 0  # not 0 in both; and of these, other values
    num_rows = 0
    for row in rows:
        a, b = (row.left != 0) & row.known, (row.right != 0) & row.known
        num_rows += bool((a != b).any())
        only = [only[0] + int((a & ~b).sum()), only[1] + int((b & ~a).sum())]
        both, changed = both + int((a & b).sum()), changed + int((row.differs & a & b).sum())
    is_systematic = num_rows == len(rows) and num_rows > 2
    if sum(only) < MIN_DISTINCT or (changed and not is_systematic):
        return None
    if not both and not only[1]:
        return Pattern("other support", f"B is 0 at all {only[0]} tokens where A is not")
    if not both and not only[0]:
        return Pattern("other support", f"A is 0 at all {only[1]} tokens where B is not")
    starts = [(np.flatnonzero(row.left), np.flatnonzero(row.right)) for row in rows]
    shifts = {
        int(b[0] - a[0]) if len(a) and len(a) == len(b) and (b - b[0] == a - a[0]).all() else 0
        for a, b in starts
    }
    shift = shifts.pop() or None if len(shifts) == 1 and len(rows) > 1 else None
    rest = f"{both}" + (f", {changed} with other values" if changed else ", equal")
    why = f"nonzero only in A: {count(only[0], 'token')}; only in B: {only[1]}; in both: {rest if both else 'none'}"
    if shift is None:
        return Pattern("other support", why)
    moved = f"moved by {count(abs(shift), 'token')} {'later' if shift > 0 else 'earlier'}"
    return Pattern("other support", f"B is not 0 where A is not, {moved}: {why}", float(shift))


def rounding(pairs: Pairs, rows: Sequence[RowPair]) -> Pattern | None:
    """Recognise differences of the size of rounding, in both directions."""
    left, right = differing(rows)
    if not pairs.epsilon or not has_same_lengths(rows) or len(left) < MIN_ROUNDED:
        return None
    known = np.concatenate([row.left[row.known] for row in rows])
    scale = float(np.sqrt(np.mean(known[known != 0] ** 2)))
    gaps = np.abs(right - left) / np.maximum(scale, np.abs(left))
    ulps = float(np.median(gaps)) / 2.0**-23
    if np.array_equal(rounded(left), right) or np.array_equal(rounded(right), left):
        side = "B is A" if np.array_equal(rounded(left), right) else "A is B"
        return Pattern("rounding", f"{side} rounded to bfloat16 in {counted(rows, left)}", ulps)
    upwards = float((right > left).mean())
    if not 0.1 <= upwards <= 0.9:
        return None
    sizes = f"median {np.median(gaps):.2g}, largest {gaps.max():.2g} of the values' size; {ulps:.3g} ulps of float32"
    if gaps.max() <= ULPS * 2.0**-23:
        return Pattern("rounding", f"{len(left)} differences of the size of float32 rounding ({sizes})", ulps)
    if gaps.max() <= CLOSE and np.median(gaps) <= BFLOAT16:
        return Pattern(
            "rounding", f"{len(left)} differences of at most the size of bfloat16 rounding ({sizes})", ulps
        )
    return None


def rounded(values: np.ndarray) -> np.ndarray:
    """Round to bfloat16, to the nearest, ties to even."""
    as_bits = values.astype(np.float32).view(np.uint32)
    up = as_bits + 0x7FFF + ((as_bits >> 16) & 1)
    return (up & 0xFFFF0000).view(np.float32).astype(np.float64)


def unrelated(rows: Sequence[RowPair]) -> Pattern | None:
    """Recognise numbers that have nothing to do with those of the other side."""
    left, right = differing(rows)
    if len(left) < MIN_UNRELATED or np.ptp(left) == 0 or np.ptp(right) == 0:
        return None
    correlation = float(np.corrcoef(left, right)[0, 1])
    if not abs(correlation) <= UNRELATED:
        return None
    return Pattern(
        "replaced", f"{len(left)} values have nothing in common with A's (correlation {correlation:.2f})"
    )


def other_prompts(pairs: Pairs) -> Pattern:
    """Describe prompts that differ: the same ones in another order, or others."""
    sides = [
        [side.tobytes() for side in sides]
        for sides in zip(*((r.left, r.right) for r in pairs.rows), strict=True)
    ]
    moved = sum(a != b for a, b in zip(*sides, strict=True))
    if Counter(sides[0]) == Counter(sides[1]):
        return Pattern("same set, other order", f"{moved} rows have the prompt of another row", float(moved))
    common = len(set(sides[0]) & set(sides[1]))
    return Pattern(
        "replaced",
        f"{moved} of {len(pairs.rows)} rows have another prompt; {common} of {len(set(sides[0]))} prompts of A are in B",
        float(moved),
    )


def other_values(rows: Sequence[RowPair]) -> Pattern | None:
    compared, other = 0, 0
    for row in rows:
        first = int(np.flatnonzero(row.differs)[0]) if row.differs.any() else len(row.differs)
        compared += max(len(row.left), len(row.right)) - first
        other += int(row.differs.sum()) + abs(len(row.left) - len(row.right))
    if compared < MIN_UNRELATED or other < compared / 2:
        return None
    return Pattern(
        "replaced", f"{other} of {compared} tokens are others, from the first that differs in each row"
    )
