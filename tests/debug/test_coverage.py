"""`areal-debug record coverage`: rows of the data that were lost or trained on twice."""

import json
import random

import pytest

from areal_debug import Recorder
from tests.command_line import reported
from tests.marks import late

NUM_ROWS, BATCH = 160, 5


def coverage(folder, order, *, period=NUM_ROWS, config=None, sizes=None, trainer="slime"):
    """Train on rows of the data in an order; their texts repeat after `period` rows."""
    data = folder / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"question {n % period:04d}?"}) + "\n" for n in range(NUM_ROWS))
    )
    with Recorder(folder / "record", trainer=trainer, config=config or {}, overwrite=True) as recorder:
        for step, at in enumerate(range(0, len(order), BATCH)):
            samples = [
                {
                    "prompt": f"<|user|>question {n % period:04d}?<|end|>",
                    "completion": "4",
                    "reward": 1.0,
                    "group": (step, place),
                }
                for place, n in enumerate(order[at : at + BATCH])
                for _ in range((sizes or {}).get(n, 2))
            ]
            recorder.step(step, samples)
    return reported("record", "coverage", folder / "record", data)


@pytest.mark.parametrize("period", [NUM_ROWS, pytest.param(40, marks=pytest.mark.long), 16])
def test_lost_rows_are_counted_whether_prompts_repeat_or_not(tmp_path, period):
    read = [n for n in range(140) if n % 9 != 4]
    code, found = coverage(tmp_path, read[:100], period=period)
    assert (code, found["verdict"]) == (1, "incomplete")
    assert found["lost"][:4] == [4, 13, 22, 31]
    assert "were read were never trained on" in found["findings"][0]


def test_rows_in_flight_and_out_of_order_are_not_lost(tmp_path):
    chance = random.Random(0)
    order = sorted(range(120), key=lambda n: n + chance.uniform(0, 8))[:100]
    code, found = coverage(tmp_path, order)
    assert (code, found["lost"], found["twice"]) == (0, [], [])


def test_rows_before_the_first_are_skipped(tmp_path):
    code, found = coverage(tmp_path, range(60, 160))
    assert (code, found["findings"][0][:56]) == (
        1,
        "rows 0 to 59 come before the first that was trained on: ",
    )


def test_data_that_is_read_again_before_its_end_is_named(tmp_path):
    code, found = coverage(tmp_path, [*range(50), *range(50)])
    assert (code, len(found["twice"])) == (1, 50)
    assert "read again from row 0 on after step 9, before its end" in found["findings"][0]
    assert coverage(tmp_path, [*range(NUM_ROWS), *range(40)])[0] == 0  # a second pass
    mixed = random.Random(3).sample(range(NUM_ROWS), NUM_ROWS)
    for period in (2, 40):  # equal rows have no order
        assert coverage(tmp_path, mixed, period=period)[1]["twice"] == []


def test_a_filter_or_a_shuffled_order_is_inconclusive(tmp_path):
    read = [n for n in range(140) if n % 9 != 4][:100]
    code, found = coverage(tmp_path, read, config={"dynamic_sampling_filter_path": "filters.check"})
    assert (code, found["findings"]) == (2, [])
    assert any("the configuration filters groups" in note for note in found["notes"])
    code, found = coverage(tmp_path, random.Random(1).sample(range(NUM_ROWS), 80))
    assert (code, found["verdict"]) == (2, "unknown")


@pytest.mark.parametrize(
    ("seeds", "config", "trainer", "says"),
    [
        ((1, 1), {"rollout_shuffle": True}, "slime", "findings"),
        ((1, 1), {"rollout_shuffle": True}, "another", "notes"),
        ((1, 2), {"rollout_shuffle": True}, "slime", ""),
        ((1, 1), {"data": {"shuffle": False}}, "slime", ""),
    ],
)
def test_one_order_of_all_passes_is_named_where_an_option_shuffles(tmp_path, seeds, config, trainer, says):
    order = [n for seed in seeds for n in random.Random(seed).sample(range(NUM_ROWS), NUM_ROWS)]
    found = coverage(tmp_path, order[:250], config=config, trainer=trainer)[1]
    text = "each pass has the rows in one order, and an option shuffles them"
    assert [of for of in ("findings", "notes") if any(text in one for one in found[of])] == [says] * bool(
        says
    )


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda order: order, "complete"),
        (lambda order: [n for n in order if n % 9 != 4], "incomplete"),
        late(lambda order: [n for n in order for _ in range(1 + 3 * (n % 9 == 4))], "incomplete"),
        (lambda order: random.Random(2).choices(range(NUM_ROWS), k=len(order)), "unknown"),
    ],
)
def test_a_whole_pass_decides_in_a_shuffled_order(tmp_path, change, verdict):
    """Passes of another order each, without a last batch that is not whole; lost, repeated, drawn rows."""
    order = [n for seed in range(3) for n in random.Random(seed).sample(range(NUM_ROWS), NUM_ROWS - 3)]
    found = coverage(tmp_path, change(order)[:480])[1]
    assert found["verdict"] == verdict
    assert all(n % 9 == 4 for n in (*found["lost"], *found["twice"]))
