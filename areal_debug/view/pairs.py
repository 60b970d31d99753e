"""Match the samples of two steps, and list where they differ, as `why --all` does."""

import math
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from areal_core.safety.printable import printable
from recorder import RecordedStep
from replayer.compare.stages import StageDifference, compare_steps, find_rows, match_rows

MOST_DIFFERENCES = 200  # of a step: its weights alone may be thousands


def pair_document(left: RecordedStep, right: RecordedStep, foreign: tuple[bool, bool]) -> dict[str, Any]:
    """Return the pair of two steps as a JSON document for the page.

    `match` has the row of the left step, counted over all ranks, of each row of the right one, -1
    if it has none.

    Args:
        foreign: whether the left and the right record are of another trainer.
    """
    here, there = find_rows(left), find_rows(right)
    if any(foreign) or not here.keys() & there.keys():  # else both number prompts and samples alike
        here, there = match_rows(left, right)
    starts, other_starts = first_rows(left), first_rows(right)
    match = [-1] * other_starts[-1]
    for name, row in there.items():
        if name in here:
            match[other_starts[row.rank] + row.row] = starts[here[name].rank] + here[name].row
    differences = compare_steps(left, right, foreign) if left.manifest.step == right.manifest.step else ()
    return {
        "match": match,
        "differences": [fact_of(one) for one in differences[:MOST_DIFFERENCES]],
        "num_differences": len(differences),
    }


def first_rows(step: RecordedStep) -> list[int]:
    return [0, *accumulate(map(step.num_rows, step.ranks))]


def fact_of(difference: StageDifference) -> dict[str, Any]:
    """Return a difference without its values, which the page shows."""
    place = difference.place and asdict(difference.place)
    largest = difference.largest
    return {
        "stage": difference.stage,
        "name": printable(difference.name),
        "minibatch": difference.minibatch,
        "num_different": difference.num_different,
        "num_compared": difference.num_compared,
        "largest": largest if largest is not None and math.isfinite(largest) else None,
        "place": place and {key: place[key] for key in ("prompt_id", "sample_id", "token")},
    }
