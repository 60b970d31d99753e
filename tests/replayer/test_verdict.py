"""A replay's verdict: other numbers or other weights, the first stage and row, the next command."""

import io
import json
import shlex
from dataclasses import replace
from functools import partial

import click
import pytest
from rich.console import Console

from areal_core.engine.fsdp import FSDPEngine
from areal_core.trainer import objective
from areal_debug.cli import main
from areal_debug.render import REPORT_FILE, VERBOSE
from areal_debug.replay.observer import replay_reporter
from areal_debug.replay.report import next_commands, report_of_comparison
from areal_debug.report.terminal import print_report
from areal_debug.wiring import recorder_of
from recorder.difference import Difference
from replayer.check import HeaderComparison, RankDifference, ReplayReport, StepResult, parse_report
from replayer.noise import Guarantee, Verdict
from replayer.request import Request
from replayer.run import replay, replay_and_compare

GOOD, BAD = "5d5b2e1f0c9a" + 28 * "0", "c0ffee000000" + 28 * "0"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, tiny_model, record_run):
    """Three deterministic steps in two scopes: with "full" there are tensors of each stage."""
    patch = pytest.MonkeyPatch()
    patch.setattr("areal_core.trainer.build.enforce_determinism", lambda device: None)
    made = {
        scope: record_run(
            tmp_path_factory.mktemp(scope), tiny_model, 3, deterministic=True, debug__dump_scope=scope
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
        replay(Request(record.path, 0, 2, **options), [make])
        assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
        document = json.loads((tmp_path / "report.json").read_text())
        return parse_report(document), document, capsys.readouterr().out.splitlines()

    return run


@pytest.fixture
def reversed_micro_batches(monkeypatch):
    """Compute the micro-batches of every minibatch in the other order."""
    real = FSDPEngine.divide
    monkeypatch.setattr(FSDPEngine, "divide", lambda *arguments: real(*arguments)[::-1])


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


@pytest.mark.long
def test_another_order_of_micro_batches_leaves_the_weights_the_same(
    recorded, reported, reversed_micro_batches
):
    run = recorded["full"]
    report, document, lines = reported(run)
    assert (report.result, report.identical, report.weights_diverge_at) == (
        "same weights, other numbers",
        False,
        None,
    )
    assert (document["result"], document["weights_diverge_at"]) == ("same weights, other numbers", None)
    assert [result.same_weights for result in report.steps] == [True, True, True]
    assert {d.kind for result in report.steps for d in result.differences} == {"loss"}
    first = run.record.step(0).outcome(0).micro_batches[0].rows
    last = [m.rows for m in run.record.step(0).outcome(0).micro_batches if m.minibatch == 0][-1]
    assert (report.first.stage, report.first.name) == ("loss", "rows of rank 0, micro-batch 0")
    assert (list(report.first.left), list(report.first.right)) == (list(first), list(last))
    steps = [line for line in lines if line.startswith("step ")]
    assert [line[:24] for line in steps] == [f"step    {step}  same weights " for step in range(3)]
    assert "(recorded" not in "".join(steps)
    verdict = next(line for line in lines if line.startswith("Same weights, other numbers: "))
    assert verdict.endswith(
        "3 of 3 steps have other numbers, the first is step 0 (loss); after every step all 20 parameters have "
        "the recorded bits."
    )


def test_weights_diverge_at_the_step_whose_stage_and_row_are_named(recorded, reported, changed_advantage):
    report, document, lines = reported(recorded["full"])
    assert (report.result, report.weights_diverge_at) == ("diverged", 1)
    assert document["first_different"] == 1
    first = document["first"]
    assert (first["stage"], first["name"]) == ("advantages", "returns")
    assert first["num_different"] == 1  # advantages, which are normalised, follow from it
    assert (first["place"]["rank"], first["place"]["row"]) == (0, 5)
    assert "step    0  identical    " in lines[0]
    assert "step    1  other weights" in lines[1]
    assert any(line.startswith("Weights diverge at step 1: 2 of 3 steps") for line in lines)
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


def test_details_are_printed_on_request(recorded, reported, reversed_micro_batches, monkeypatch):
    monkeypatch.setenv(VERBOSE, "1")
    _, _, lines = reported(recorded["plan"])
    assert sum("values differ; 20 parameter checksums" in line for line in lines) == 3
    assert lines[2].startswith("           loss minibatch 0, micro-batch 0, ")
    assert " (rank 0): recorded " in lines[2]


def test_identical_steps_are_one_line_each_with_the_numbers_of_training(recorded, reported):
    run = recorded["plan"]
    report, document, lines = reported(run)
    assert (report.result, document["first"], len(lines)) == ("identical", None, 4)
    loss = run.record.step(2).outcome(0).stats["ppo_actor/update/loss"]
    assert lines[2].startswith("step    2  identical      reward 0.")
    assert f"  loss {loss:.4g}  grad_norm " in lines[2]
    assert lines[3].startswith("Bit-identical: 3 of 3 steps")


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


def report_of(kind="bitwise", finding="different", code=()):
    """A report of two steps, of which the second differs in its weights."""
    same = StepResult(3, 9, 2, 0.0, 1.0, (), {}, {})
    other = replace(same, step=4, differences=(RankDifference(0, "parameter", "w", "1", "2"),))
    environment = tuple(Difference(f"code.{name}", *values) for name, values in code)
    return ReplayReport(
        "r",
        HeaderComparison((), environment, ()),
        Guarantee(kind),
        [same, other],
        Verdict(finding, None, None, None),
    )


@pytest.mark.parametrize(
    ("report", "request_", "commands"),
    [
        (report_of(), Request("r", 0, 9), ["areal-debug why r", "areal-debug goto r --step 4 --shell"]),
        (
            report_of(code=[("commit", (GOOD, BAD)), ("dirty_sha256", (None, "1"))]),
            Request("my runs/r", 0, 9, "m"),
            [
                "areal-debug why 'my runs/r' --model m",
                "areal-debug why 'my runs/r' --commits 5d5b2e1f0c9a..c0ffee000000 --to-step 4 --model m",
                "areal-debug goto 'my runs/r' --step 4 --model m --shell",
            ],
        ),
        (
            report_of(code=[("dirty_sha256", (None, "1"))]),
            Request("r", 0, 9, record_to="again"),
            [
                "areal-debug why r again",
                "areal-debug why r again --all --step 4",
                "git diff HEAD",
                "areal-debug goto r --step 4 --shell",
            ],
        ),
        (report_of("noise", "within"), Request("r", 0, 9), []),
        (report_of("changed", "changed"), Request("r", 0, 9), []),
    ],
)
def test_the_next_commands_are_those_that_continue_from_the_difference(report, request_, commands):
    assert next_commands(report, request_) == commands
    for command in commands:
        name, verb, *arguments = shlex.split(command)
        if name == "areal-debug":
            found = main.get_command(click.Context(main), verb)
            assert found.make_context(verb, arguments).params  # every option is one of the verb
