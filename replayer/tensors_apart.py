"""Find where the recorded tensors of one step diverge: tensor, row, token, and by how much.

Rows are matched by (prompt_id, sample_id) over all ranks, so records with different numbers of
ranks can be compared. Tensors whose checksums in step.json are equal are not read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recorder import RecordedStep
from recorder.format import BatchEntry, TensorEntry

LOGPROBS = ("prox_logp", "ref_logp", "teacher_logp", "values")
ROW_KEYS = ("cu_seqlens", "prompt_id", "sample_id")
# in the order of computation: the first difference explains later ones
ORDER = (
    "input_ids",
    "loss_mask",
    "finish_reason",
    "rewards",
    "logprobs",
    "versions",
    "prox_logp",
    "ref_logp",
)


@dataclass(frozen=True)
class Place:
    """A row of a step, and a token of it (None: a value of the row).

    `rank` and `row` are of the left record.

    `in_prompt`: the token precedes the first one in the loss mask.
    """

    rank: int
    row: int
    prompt_id: int
    sample_id: int
    token: int | None = None
    in_prompt: bool = False


@dataclass(frozen=True)
class StageDifference:
    """A tensor or a value that differs, and the stage that computes it.

    Attributes:
        left, right: the first values that differ; None if absent.
        num_different, num_compared: elements that differ in bits, of how many.
        largest: the largest absolute difference; None unless they are floats.
        place: where `left` and `right` are; None outside the rows of a batch.
        minibatch: the minibatch of a loss, gradient or weight.
    """

    stage: str
    name: str
    left: Any
    right: Any
    num_different: int = 1
    num_compared: int = 1
    largest: float | None = None
    place: Place | None = None
    minibatch: int | None = None


@dataclass(frozen=True)
class Row:
    """Position of a row in its rank's flat tensors; the prompt has `prompt_length` tokens."""

    rank: int
    row: int
    begin: int
    end: int
    prompt_length: int

    def slice(self, arrays: Sequence[np.ndarray], per_token: bool) -> np.ndarray:
        """Return the row's tokens, or its one value, from an array per rank."""
        begin, end = (self.begin, self.end) if per_token else (self.row, self.row + 1)
        return arrays[self.rank][begin:end]


Rows = dict[tuple[int, int], Row]
Files = list[tuple[str, BatchEntry]]


def compare_tensors(left: RecordedStep, right: RecordedStep, kind: str) -> Iterator[StageDifference]:
    """Compare the tensors of a kind, "batch" or "learning", if both sides recorded them."""
    here, there = files(left, kind), files(right, kind)
    if not here or not there:
        return
    keys = {key: None for _, entry in (here[0], there[0]) for key in entry.tensors}
    suspects = [key for key in keys if tensor_entries(here, key) != tensor_entries(there, key)]
    if not suspects:
        return
    rows, other_rows = find_rows(left), find_rows(right)
    if kind == "batch":
        yield from compare_rows(rows, other_rows)
    for key in sorted(set(suspects) - set(ROW_KEYS), key=position):
        entries = tensor_entries(here, key)[0], tensor_entries(there, key)[0]
        if entries[0] is None or entries[1] is None:
            dtypes = [entry and entry.dtype for entry in entries]
            yield StageDifference(stage_of(kind, key), key, left=dtypes[0], right=dtypes[1])
            continue
        arrays, others = read_all(left, here, key), read_all(right, there, key)
        yield from compare_tensor(
            stage_of(kind, key), key, (rows, other_rows), (arrays, others), entries[0].axis == "token"
        )


def stage_of(kind: str, name: str) -> str:
    """Return the stage that computes a tensor of a "batch" or "learning" file."""
    if kind == "batch":
        return "batch"
    return "logprobs" if name in LOGPROBS else "advantages"


def files(step: RecordedStep, kind: str) -> Files:
    """Name and entry of each rank's file of a kind; empty if the kind was not recorded."""
    names = [step.rank_name(kind, rank, "safetensors") for rank in range(step.manifest.num_ranks)]
    return [(name, step.manifest.batches[name]) for name in names if name in step.manifest.batches]


def tensor_entries(entries: Files, key: str) -> list[TensorEntry | None]:
    """Return every rank's entry of a tensor in step.json: equal entries mean equal bytes."""
    return [({key: None} | entry.tensors)[key] for _, entry in entries]


def read_all(step: RecordedStep, entries: Files, key: str) -> list[np.ndarray]:
    """Read a tensor of every rank."""
    return [step.tensors(name, entry, [key])[key] for name, entry in entries]


def position(key: str) -> tuple[int, str]:
    """Sort key of a tensor in the order of computation."""
    return (ORDER.index(key) if key in ORDER else len(ORDER), key)


def find_rows(step: RecordedStep) -> Rows:
    """Return every row of a step by (prompt_id, sample_id), in the order of ranks and rows."""
    rows: Rows = {}
    for rank in range(step.manifest.num_ranks):
        arrays = step.batch(rank, (*ROW_KEYS, "loss_mask"))
        bounds, mask = arrays["cu_seqlens"].tolist(), arrays["loss_mask"]
        names = zip(arrays["prompt_id"].tolist(), arrays["sample_id"].tolist(), strict=True)
        for row, name in enumerate(names):
            begin, end = bounds[row], bounds[row + 1]
            trained = np.flatnonzero(mask[begin:end])
            rows[name] = Row(rank, row, begin, end, int(trained[0]) if len(trained) else end - begin)
    return rows


def compare_rows(left: Rows, right: Rows) -> Iterator[StageDifference]:
    """Yield rows that only one side has, or that come in another order."""
    union = {**left, **right}
    alone = [name for name in union if name not in left or name not in right]
    if alone:
        sides = ["present" if alone[0] in rows else None for rows in (left, right)]
        place = place_of(alone[0], union[alone[0]])
        yield StageDifference("batch", "rows", sides[0], sides[1], len(alone), len(union), place=place)
    elif list(left) != list(right):
        moved = [(name, other) for name, other in zip(left, right, strict=True) if name != other]
        name, other = moved[0]
        yield StageDifference(
            "batch", "order of rows", name, other, len(moved), len(left), place=place_of(name, left[name])
        )


def place_of(name: tuple[int, int], row: Row, token: int | None = None) -> Place:
    """Return the row as a place."""
    return Place(row.rank, row.row, name[0], name[1], token, token is not None and token < row.prompt_length)


def compare_tensor(
    stage: str,
    key: str,
    rows: tuple[Rows, Rows],
    arrays: tuple[Sequence[np.ndarray], Sequence[np.ndarray]],
    per_token: bool,
) -> Iterator[StageDifference]:
    """Yield the difference of one tensor in the rows that both sides have, if its bits differ.

    Args:
        rows, arrays: of the left and of the right side; one array per rank.
    """
    found: list[StageDifference] = []
    num_different, num_compared = 0, 0
    here, there = rows
    for name in [name for name in here if name in there]:
        a, b = here[name].slice(arrays[0], per_token), there[name].slice(arrays[1], per_token)
        different, largest = differing_elements(a, b)
        num_different, num_compared = num_different + len(different), num_compared + max(len(a), len(b))
        if len(different):
            index = int(different[0])
            place = place_of(name, here[name], index if per_token else None)
            found.append(
                StageDifference(
                    stage, key, value_at(a, index), value_at(b, index), largest=largest, place=place
                )
            )
    if found:
        first = found[0]
        sizes = [one.largest for one in found if one.largest is not None]
        yield replace(
            first,
            num_different=num_different,
            num_compared=num_compared,
            largest=max(sizes, default=None),
        )


def differing_elements(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, float | None]:
    """Return indices at which two rows differ in bits, and the largest float difference."""
    shared = min(len(left), len(right))
    a, b = left[:shared], right[:shared]
    unequal = a != b if a.dtype != b.dtype else bits(a) != bits(b)
    indices = np.flatnonzero(unequal.reshape(shared, -1).any(axis=1))
    beyond = np.arange(shared, max(len(left), len(right)))
    if a.dtype.kind != "f" or not len(indices):
        return np.concatenate([indices, beyond]), None
    gaps = np.abs(a[indices].astype(np.float64) - b[indices].astype(np.float64))
    return np.concatenate([indices, beyond]), float(gaps.max())


def bits(array: np.ndarray) -> np.ndarray:
    """Return the array's bits as integers: 0.0 is not -0.0, and NaN equals NaN."""
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "f" else array


def value_at(array: np.ndarray, index: int) -> Any:
    """Return an element as a Python number, None beyond the end."""
    return array[index].tolist() if index < len(array) else None
