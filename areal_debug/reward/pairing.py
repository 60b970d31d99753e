"""Ways in which rewards and rows can be paired wrongly, tried before a reward function is accused.

A pairing is judged by nats: of the rewards that it explains, each is worth the surprise of its
value among all of the step, a miss costs `MISS`, and each place where a shift changes costs what it
takes to say where it is. A function that is merely different explains nothing by chance.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MISS, CLEAR = 6.0, 5.0  # nats: of a reward that is not explained, and of a pairing that is reported
MOST_ROWS_APART = 24
UNPAIRED = -1


@dataclass(frozen=True)
class Pairing:
    """Rewards of a step that belong to other rows.

    Attributes:
        first_row: from which on they do, in the order of the record.
        agree: rows whose reward is explained, of `rows`; `before`: without the pairing.
        nats: by which it explains them better than chance.
    """

    step: int
    how: str
    first_row: int
    agree: int
    before: int
    rows: int
    nats: float

    @property
    def sentence(self) -> str:
        """What is wrong."""
        return (
            f"rewards are paired with other rows: from row {self.first_row} of step {self.step} on, {self.how}; "
            f"then {self.agree} of {self.rows} rows agree, and {self.before} as they are"
        )


def find_pairing(step: int, recorded: Floats, again: Floats, groups: Ints) -> Pairing | None:
    """Return the pairing that explains recorded rewards [n] by those scored again, if one does.

    `groups` number the prompts of the rows.
    """
    own = nats_of(recorded, again, np.arange(len(again)))
    tried = [(*at_another_place(recorded, again), 0.0)]
    tried += [(order, how, np.log(len(again))) for order, how in orders(groups)]
    score, order, how = max(
        ((nats_of(recorded, again, order) - cost, order, how) for order, how, cost in tried),
        key=lambda one: one[0],
    )
    moved = np.flatnonzero(order != np.arange(len(order)))
    if not len(moved) or score < CLEAR or score < own + CLEAR:
        return None
    agree = int((same(recorded, again, order)).sum())
    before = int((recorded == again).sum())
    return Pairing(step, how, int(moved[0]), agree, before, len(again), float(score))


def same(recorded: Floats, again: Floats, order: Ints) -> npt.NDArray[np.bool_]:
    """Return which rows a pairing explains; `order` is the row whose reward each one has."""
    return np.asarray((order != UNPAIRED) & (recorded == again[order]))


def surprises(recorded: Floats, again: Floats) -> Floats:
    """Return the nats of each recorded value among those scored again."""
    ordered = np.sort(again)
    share = np.searchsorted(ordered, recorded, "right") - np.searchsorted(ordered, recorded)
    return np.asarray(-np.log((share + 1) / (len(again) + 2)))


def nats_of(recorded: Floats, again: Floats, order: Ints) -> float:
    """Return how much better than chance a pairing explains the recorded rewards."""
    paired = order != UNPAIRED
    offsets, is_shift = (order - np.arange(len(order)))[paired], (np.diff(order[paired]) > 0).all()
    changes = int((np.diff(offsets) != 0).sum()) if is_shift else 0
    gain = np.where(same(recorded, again, order), surprises(recorded, again), -MISS)
    return float(np.where(order == UNPAIRED, 0.0, gain).sum()) - changes * float(np.log(len(again)))


def at_another_place(recorded: Floats, again: Floats) -> tuple[Ints, str]:
    """Return the shift, which may change from row to row, that explains most.

    A value too many moves all after it by one row, a missing one the other way.
    """
    n, apart = len(again), min(MOST_ROWS_APART, len(again) - 1)
    offsets = np.arange(-apart, apart + 1)
    worth, cost = surprises(recorded, again), float(np.log(n))
    score = np.where(offsets == 0, 0.0, -cost)
    came = np.zeros((n, len(offsets)), np.int64)  # the offset before, by index
    for row in range(n):
        best = score.copy()
        came[row] = np.arange(len(offsets))
        for by in (-1, 1):
            moved = np.roll(score, by) - cost
            moved[0 if by == 1 else -1] = -np.inf
            better = moved > best
            best[better], came[row][better] = moved[better], (np.arange(len(offsets)) - by)[better]
        source = row - offsets
        is_there = (source >= 0) & (source < n)
        hit = is_there & (again[np.clip(source, 0, n - 1)] == recorded[row])
        is_inserted = came[row] < np.arange(len(offsets))  # a value too many belongs to no row
        score = best + np.where(is_inserted, 0.0, np.where(hit, worth[row], np.where(is_there, -MISS, -1.0)))
    at, order = int(np.argmax(score)), np.zeros(n, np.int64)
    for row in range(n - 1, -1, -1):
        source = row - offsets[at]
        is_inserted = came[row][at] < at
        order[row] = source if 0 <= source < n and not is_inserted else UNPAIRED
        at = int(came[row][at])
    last = [row - source for row, source in enumerate(order.tolist()) if source != UNPAIRED]
    by = last[-1] if last else 0
    side = "before" if by > 0 else "after"
    changes = int((np.diff(last) != 0).sum())
    how = f"each row has the reward of another row, shifted: at the end that of the row {abs(by)} {side} it"
    return order, f"{how} ({changes} values {'too many' if by > 0 else 'are missing'} on the way)"


def orders(groups: Ints) -> Iterator[tuple[Ints, str]]:
    """Yield orders of rows that a program can mistake for that of the record."""
    n, (_, counts) = len(groups), np.unique(groups, return_counts=True)
    rows = np.arange(n)
    yield rows[::-1].copy(), "they are in the reverse order"
    size = int(counts[0])
    for by in {*range(1, size + 1), *(-by for by in range(1, size + 1))}:
        yield (
            np.roll(rows, by),
            f"each row has the reward of the row {abs(by)} {'before' if by > 0 else 'after'} it, in a ring",
        )
    if (counts == size).all() and 1 < size < n:
        yield rows.reshape(-1, size).T.ravel(), "they are in the order of samples, and rows in that of groups"
        yield rows.reshape(size, -1).T.ravel(), "they are in the order of groups, and rows in that of samples"
        yield rows.reshape(-1, size)[:, ::-1].ravel(), "they are in the reverse order within each group"
        yield rows.reshape(-1, size)[::-1].ravel(), "groups are in the reverse order"
        half = rows.reshape(-1, size)
        yield (
            np.concatenate([half[0::2], half[1::2]]).ravel(),
            "they are those of two workers, one after the other",
        )
        yield (
            np.argsort(np.concatenate([half[0::2], half[1::2]]).ravel()),
            "rows are those of two workers in turn",
        )


def find_pairings(scored: Sequence[tuple[int, int, float, float]]) -> tuple[Pairing, ...]:
    """Return the pairing of each step, of (step, prompt, recorded reward, reward scored again)."""
    found, steps = [], defaultdict(list)
    for row in scored:
        steps[row[0]].append(row)
    for step, own in steps.items():
        _, prompts, recorded, again = (np.array(column) for column in zip(*own, strict=True))
        if len(own) > 1:
            found.append(find_pairing(step, recorded.astype(float), again.astype(float), prompts))
    return tuple(one for one in found if one is not None)
