"""`areal-debug eval --compare`: saved evaluations, changed prompts, exit codes, wrong input."""

import json
import shutil

import pytest
from click.testing import CliRunner

from areal_debug.cli import main
from tests.evaluation.test_results import write_results
from tests.evaluation.test_rows import pair, write_rows

RIGHT, WRONG = [1.0], [0.0]


def compare(*arguments) -> tuple[int, str]:
    """Return the exit code and what is printed, in one line."""
    done = CliRunner().invoke(main, ["eval", "--compare", *map(str, arguments)])
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def before(tmp_path):
    rewards = [RIGHT] * 9 + [WRONG] * 3
    return write_results(tmp_path / "before-eval" / "evaluation", {"m": rewards}, n_samples=1).parent


@pytest.fixture
def worse(tmp_path):
    rewards = [WRONG] * 8 + [RIGHT] * 2 + [WRONG] * 2
    return write_results(tmp_path / "after-eval" / "evaluation", {"n": rewards}, n_samples=1).parent


def test_a_worse_evaluation_is_found_with_the_prompts_that_changed(before, worse):
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
    assert "right to wrong after-eval (8): 0 '?'; 1 '?'; 2 '?'; 3 '?'; 4 '?'; ..." in out


def test_the_exit_code_is_that_of_the_verdict_or_of_a_limit(before, worse):
    assert compare(worse, before)[0] == 0  # better
    assert compare(before, before)[0] == 0
    assert compare(before, worse, "--fail-below", "-0.6")[0] == 0
    assert compare(before, worse, "--fail-below", "-0.5")[0] == 1
    assert compare(before, before, "--fail-below", "0.01")[0] == 1  # an improvement is requested


def test_evaluations_of_several_models_and_other_options_are_named(tmp_path, before):
    folder = write_results(tmp_path / "other", {"a": [[0.0, 1.0]] * 12, "b": [[1.0, 1.0]] * 12}, n_samples=2)
    summary = json.loads((folder / "evaluation.json").read_text())
    summary["sampling"]["temperature"] = 1.0
    (folder / "evaluation.json").write_text(json.dumps(summary))
    report = json.loads(compare(before, folder, "--json")[1])
    assert [model["name"] for model in report["models"]] == ["before-eval", "other:a", "other:b"]
    assert [list(model["measures"]) for model in report["models"]] == [["mean reward", "pass@1"]] * 3
    assert report["differing_settings"] == [
        "other was evaluated with n_samples 2 and not 1, temperature 1.0 and not 0.6"
    ]


def test_wrong_input_is_one_sentence(tmp_path, before):
    def refused(*arguments) -> str:
        code, out = compare(*arguments)
        assert code == 2
        return out

    assert f"{tmp_path} has no evaluation.json".split("/")[-1] in refused(before, tmp_path)
    rows = write_rows(tmp_path / "rows", "rw", {"m": [pair(1.0)]})
    assert "rows is an evaluation of rows (rw) and before-eval one of samples" in refused(before, rows)
    other = tmp_path / "other"
    shutil.copytree(before, other)
    file = other / "evaluation" / "samples-0.jsonl"
    file.write_text(file.read_text().replace('"?"', '"!?"'))
    assert "prompt 0 of other has other tokens than that of before-eval" in refused(before, other)
    file.write_text(json.dumps({"prompt_id": 0}))
    assert "is not what areal-debug eval writes (KeyError: 'finish_reason'): evaluate again" in refused(
        before, other
    )
    assert "--k is '2' and each row has 1 samples" in refused(before, before, "--k", "2")
