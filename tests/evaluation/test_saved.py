"""`areal-debug eval --compare`: saved evaluations, changed prompts, exit codes, wrong input."""

import json

import pytest

from tests.command_line import invoke
from tests.evaluation.test_results import write_results

RIGHT, WRONG = [1.0], [0.0]


def compare(*arguments) -> tuple[int, str]:
    done = invoke("eval", "--compare", *arguments)
    return done.exit_code, " ".join(done.output.split())


def test_a_worse_evaluation_is_found_with_the_prompts_that_changed(tmp_path):
    rewards = {"before": [RIGHT] * 9 + [WRONG] * 3, "after": [WRONG] * 8 + [RIGHT] * 2 + [WRONG] * 2}
    before, worse = (
        write_results(tmp_path / f"{name}-eval" / "evaluation", {name: of}, n_samples=1).parent
        for name, of in rewards.items()
    )
    code, out = compare(before, worse, "--json")
    assert code == 1
    report = json.loads(out)
    assert [model["name"] for model in report["models"]] == ["before-eval", "after-eval"]
    [item] = report["comparisons"]
    reward = item["measures"]["mean reward"]
    assert reward["value"] == pytest.approx(-7 / 12)
    assert reward["low"] < -7 / 12 < reward["high"] < 0
    assert [change["number"] for change in item["became_wrong"]] == list(range(8))
    assert [(of["number"], of["before"], of["after"]) for of in item["became_right"]] == [(9, 0.0, 1.0)]
    assert item["p_value"] == pytest.approx(2 * (1 + 9) / 2**9)  # McNemar: 8 of 9 in one direction
    assert item["verdict"] == "worse"
    code, out = compare(before, worse)
    assert code == 1
    assert "right to wrong after-eval (8): 0 '1 + 1'; 1 '2 + 1'; 2 '3 + 1'; 3 '4 + 1'; 4 '5 + 1'; ..." in out
