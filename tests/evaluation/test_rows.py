"""Supervised results on disk to a report: literal numbers, ties, changed pairs, refusals."""

import math

import pytest

from areal_debug.eval.results import make_report, read_models, read_settings
from tests.evaluation.conftest import printed, write_evaluation


def write_rows(folder, method: str, of_models: dict[str, list[dict]]):
    lines = {
        path: [{"row_id": i, "row_sha256": f"a{i}"} | row for i, row in enumerate(rows)]
        for path, rows in of_models.items()
    }
    return write_evaluation(folder, lines, method=method, num_rows=len(next(iter(lines.values()))))


def pair(margin: float) -> dict[str, float]:
    return {"loss": math.log(1 + math.exp(-margin)), "accuracy": float(margin > 0), "margin": margin}


def report_of(folder):
    settings = read_settings(folder)
    return make_report("e/t", settings, read_models(folder, settings, (), 0.0))


def test_a_loss_is_a_mean_over_tokens(tmp_path):
    rows = [{"num_tokens": 1, "loss": 4.0}, {"num_tokens": 3, "loss": 2.0}, {"num_tokens": 0, "loss": 0.0}]
    [model] = report_of(write_rows(tmp_path, "sft", {"m": rows})).models
    assert model.measures["loss"].value == pytest.approx(2.5)
    assert (model.measures["loss"].low, model.measures["loss"].high) == (2.0, 4.0)
    assert model.measures["perplexity"].value == pytest.approx(math.exp(2.5))
    assert model.measures["perplexity"].high == pytest.approx(math.exp(4.0))
    assert (model.num_rows, model.facts) == (3, {"num_tokens": 4})


def test_pairs_have_an_accuracy_a_margin_and_the_pairs_that_changed(tmp_path, capsys):
    before = [pair(1.0), pair(2.0), pair(0.0), pair(-1.0)]
    after = [pair(-1.0), pair(3.0), pair(0.5), pair(-2.0)]
    report = report_of(write_rows(tmp_path, "rw", {"base": before, "new": after}))
    assert report.models[0].measures["accuracy"].value == 0.5
    assert report.models[0].measures["margin"].value == 0.5
    assert [model.facts["num_ties"] for model in report.models] == [1, 0]
    [item] = report.comparisons
    assert item.measures["accuracy"].value == 0.0
    assert [change.number for change in (*item.became_wrong, *item.became_right)] == [0, 2]
    out = printed(report, capsys)
    assert "4 validation pairs, reward model" in out
    assert "right to wrong new (1): 0" in out
    assert "pairs of base with a margin of 0: 1." in out
