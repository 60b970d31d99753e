"""Cost grows with the input and no faster: CPU seconds of verbs at two sizes."""

import math

import pytest

from benchmarks.growth import CASES, LARGEST_EXPONENT, exponent_of, in_fork, measured_in_fork
from hangdoctor.diagnose import build_case
from hangdoctor.model import Snapshot

# Items that cost about a tenth of a second beyond the start of the verb: a table, lines, and files.
QUICK = {"trace": 150}
LONG = {"record redact": 100, "export jsonl": 10_000, "doctor on a record": 300, "open RUN -o": 100, "open --all-steps -o": 100,
        "query": 500, "reward rescore": 3_000, "doctor on W&B": 2_000, "doctor on a log": 3_000, "record verify": 150, "why": 150,
        "doctor on tfevents": 2_000, "hang: Flight Recorder": 100, "hang: stacks as text": 1_000, "eval --compare": 10_000,
        "doctor on stats.jsonl": 7_000, "hang: a log": 10_000}  # fmt: skip
PARAMETERS = [*QUICK.items(), *(pytest.param(*item, marks=pytest.mark.long) for item in LONG.items())]


@pytest.mark.parametrize(("name", "few"), PARAMETERS)
def test_the_cost_of_a_verb_is_linear_in_its_input(name, few, tmp_path):
    (case,) = (case for case in CASES if case.name == name)
    best = dict.fromkeys((4, few, 4 * few), math.inf)
    for count in best:
        (tmp_path / f"of{count}").mkdir()
        in_fork(lambda count=count: case.make(tmp_path / f"of{count}" / "input", count))
    for attempt in range(6):  # the least of several runs: what else runs here can only add
        for count in best:
            folder = tmp_path / f"of{count}"
            (folder / str(attempt)).mkdir()
            cost = measured_in_fork(case.command(folder / "input", folder / str(attempt)))
            best[count] = min(best[count], cost.cpu_s)
        own = {count: cost - best[4] for count, cost in best.items() if count != 4}
        if exponent_of(own) <= LARGEST_EXPONENT:
            return
    pytest.fail(f"{name}: {own}, CPU seconds by number of items")


def test_ranks_that_nobody_looked_for_are_listed_in_one_pass():
    case = build_case(Snapshot((), expected=dict.fromkeys(range(300_000), "not_collected")))
    assert case.not_collected == tuple(range(300_000))
