"""The table of metrics in docs/guides.md: each threshold gives the finding beside it."""

from pathlib import Path

import numpy as np

from areal_debug.doctor.examine import examine
from areal_debug.doctor.read import read_run

from .runs import OURS, STEPS, healthy, write_stats

PAGE = (Path(__file__).parents[2] / "docs" / "guides.md").read_text()


def test_a_metric_out_of_its_range_gives_the_finding_of_the_table(tmp_path):
    x = np.linspace(0, 1, STEPS)
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 0.2, STEPS)
    planted = {  # one for each row
        "D01": {"reward": 0.3 + noise / 4, "eval_reward": 0.3 + noise[::-1] / 4},
        "D02": {"reward": 0.2 + 0.4 * x + rng.choice([-0.25, 0.25], STEPS)},
        "D03": {"eval_reward": 0.3 + noise / 4},
        "D10": {"importance_weight": 1.0 + 0.08 * x + noise / 100},
        "D11": {"behave_imp_weight": 1.0 + 0.08 * x + noise / 100},
        "D20": {"no_eos": 0.04 + 0.04 * x},
        "D21": {"length": 300 + 900 * x, "reward": 0.3 + noise / 4, "eval_reward": 0.3 + noise[::-1] / 4},
    }
    rows = [row.split(" | ") for row in PAGE.split("| metric |")[1].split("\n\n")[0].splitlines()[2:]]
    assert [row[2] for row in rows] == list(planted)
    quantities = {name: quantity for quantity, name in OURS.items()}
    for metric, _, finding, _ in rows:
        assert quantities[metric.strip("| `")] in planted[finding]
        folder = write_stats(tmp_path / finding, healthy() | planted[finding])
        alarms = examine(read_run(folder)).alarms
        assert finding in {alarm.id for alarm in alarms}, (finding, alarms)
