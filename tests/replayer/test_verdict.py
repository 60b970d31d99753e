"""A replay's verdict: other numbers or other weights, the first stage and row, the next command."""

import io
import json
from functools import partial

import pytest
from rich.console import Console

from areal_core.trainer import objective
from areal_debug.render import REPORT_FILE
from areal_debug.replay.observer import replay_reporter
from areal_debug.replay.report import difference_of, report_of_comparison
from areal_debug.report.terminal import print_report
from areal_debug.wiring import recorder_of
from replayer.check import parse_report
from replayer.request import Request
from replayer.run import replay, replay_and_compare

from .conftest import train_and_record


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, tiny_model):
    """Two deterministic steps in two scopes: with "full" there are tensors of each stage."""
    patch = pytest.MonkeyPatch()
    patch.setattr("areal_core.trainer.build.enforce_determinism", lambda device: None)
    made = {
        scope: train_and_record(
            tmp_path_factory.mktemp(scope), tiny_model, 2, deterministic=True, debug__dump_scope=scope
        )
        for scope in ("full", "plan")
    }
    yield made
    patch.undo()


@pytest.fixture
def reported(tmp_path, monkeypatch, capsys):
    """Replay as a rank of `train --replay-rollout` does; return the report and what it printed."""

    def run(record, **options):
        monkeypatch.setenv(REPORT_FILE, str(tmp_path / "report.json"))
        capsys.readouterr()
        make = partial(replay_reporter, make_recorder=recorder_of)
        replay(Request(record.path, 0, 1, **options), [make])
        assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
        document = json.loads((tmp_path / "report.json").read_text())
        return parse_report(document), document, capsys.readouterr().out.splitlines()

    return run


@pytest.fixture
def changed_advantage(monkeypatch):
    """Add 1 to the advantage of the first token of row 5 in step 1."""
    real, calls = objective.compute_advantages, []

    def changed(rewards, mask, *arguments, **options):
        learned = real(rewards, mask, *arguments, **options)
        calls.append(learned)
        if len(calls) == 2:
            learned.advantages[5, mask[5].nonzero()[0]] += 1.0
        return learned

    monkeypatch.setattr(objective, "compute_advantages", changed)


def test_weights_diverge_at_the_step_whose_stage_and_row_are_named(recorded, reported, changed_advantage):
    report, document, lines = reported(recorded["full"])
    assert (report.result, report.weights_diverge_at) == ("diverged", 1)
    assert document["first_different"] == 1
    first = document["first"]
    assert (first["stage"], first["name"]) == ("advantages", "returns")
    assert first["num_different"] == 1  # advantages, which are normalised, follow from it
    assert (first["place"]["rank"], first["place"]["row"]) == (0, 5)
    assert "step    0  identical    " in lines[0]
    assert "step    1  weights differ after it" in lines[1]
    assert any(line.startswith("Weights diverge at step 1: 1 of 2 steps") for line in lines)
    report.steps = report.steps[1:]  # as with --from-step 1: what differs may have acted in step 0
    assert "at step 1 or before: the replay began at step 0" in difference_of(report)
    assert any(
        line.startswith("first        step 1, stage advantages: returns, rank 0, row 5 (prompt")
        for line in lines
    )
    assert lines[-2].startswith("next         areal-debug why ")
    assert lines[-1].startswith("             areal-debug goto ")
    assert lines[-1].endswith("--step 1 --shell")


def test_without_the_tensors_the_first_statistic_is_named(recorded, reported, changed_advantage):
    report, _, _ = reported(recorded["plan"])
    assert (report.first.stage, report.first.place) == ("advantages", None)
    assert report.first.name.startswith("statistic ppo_actor/advantages/")


@pytest.mark.parametrize(
    ("row_filter", "grad_norms", "warnings"),
    [
        (
            "sample_id == 1",
            [0.0],
            ("no gradient: of 4 rows 4 x the only row of its group, whose mean is subtracted",),
        ),
        (
            "prompt_id % 4 == 2 and sample_id == 3",
            [0.0],
            (
                "no gradient: of 1 rows 1 x the only row of its group, whose mean is subtracted",
                "1 of 2 optimizer steps: only 1 row left",
            ),
        ),
        ("reward >= 0", None, ()),
    ],
)
def test_a_filter_that_leaves_no_gradient_is_reported(recorded, row_filter, grad_norms, warnings):
    report = replay_and_compare(Request(recorded["plan"].path, 0, 0, row_filter=row_filter))
    (result,) = report.steps
    assert result.warnings == warnings
    assert [result.grad_norm] == grad_norms or grad_norms is None
    assert parse_report(json.loads(json.dumps(report.to_dict()))).steps[0].warnings == warnings
    out = Console(file=io.StringIO(), width=300)
    print_report(out, report_of_comparison(report))
    shown = [line for line in out.file.getvalue().splitlines() if line.startswith("warning ")]
    assert shown == [
        f"warning      1 of 1 steps learn less than the options say; in step 0: {'; '.join(warnings)}."
    ] * bool(warnings)
