"""Going to a step restores the state of the run there, or reports why it cannot."""

import pytest
import torch

from areal_core.trainer import objective
from areal_debug.goto.shell import LockstepConsole
from replayer.goto import STAGES, goto


def go(run, step, look=lambda scene: None, **options):
    """Return the report, and the result of `look`."""
    seen = []
    report = goto(run.path, step, lambda scene: seen.append(look(scene)), **options)
    return report, seen


@pytest.mark.parametrize(
    ("step", "anchor", "replayed"),
    [
        (7, 4, 3),
        pytest.param(3, None, 3, marks=pytest.mark.long),
        pytest.param(0, None, 0, marks=pytest.mark.long),
        pytest.param(4, 4, 0, marks=pytest.mark.long),
        pytest.param(9, 8, 1, marks=pytest.mark.long),
    ],
)
def test_the_weights_at_a_step_are_those_of_the_run_bit_for_bit(tiny_run, weights_of, step, anchor, replayed):
    report, seen = go(tiny_run, step, lambda scene: weights_of(scene.trainer))
    assert seen == [tiny_run.weights[step]]
    assert len(set(tiny_run.weights.values())) == 10
    assert (report.anchor, len(report.replayed), report.faithful) == (anchor, replayed, True)
    assert report.num_parameters == (20 if step else 0)


def test_the_complete_state_is_available_at_the_step(tiny_run):
    _, (names,) = go(tiny_run, 5, lambda scene: scene.names())
    recorded = tiny_run.record.step(5)
    assert names["plan"] == recorded.plan(0)
    assert names["outcome"] == recorded.outcome(0)
    assert names["batch"]["rewards"].tolist() == recorded.batch(0)["rewards"].tolist()
    assert names["step"] == 5
    assert isinstance(names["optimizer"], torch.optim.AdamW)
    assert names["model"].config.vocab_size == 105


@pytest.mark.long
def test_each_stage_has_what_was_computed_by_then(tiny_run, weights_of):
    def look(scene):
        gradients = [p.grad for p in scene.trainer.actor.model.parameters()]
        norm = None if gradients[0] is None else torch.nn.utils.get_total_norm(gradients).full_tensor().item()
        return set(scene.facts) - {"step"}, norm, weights_of(scene.trainer)

    seen = {stage: go(tiny_run, 5, look, stage=stage)[1][0] for stage in STAGES}
    recorded = tiny_run.record.step(5).plan(0).details["minibatches"][0]
    assert {"advantages": seen["advantages"][0], "loss": seen["loss"][0] >= {"loss", "flat", "logprobs"}} == {
        "advantages": {"inputs"},
        "loss": True,
    }
    assert [seen[stage][1] for stage in ("batch", "advantages", "loss")] == [None] * 3
    assert seen["backward"][1] == float.fromhex(recorded["grad_norm"])
    assert seen["optimizer"][1] == pytest.approx(1.0, rel=1e-5)  # clipped
    before = [seen[stage][2] for stage in ("batch", "advantages", "loss", "backward")]
    assert set(before) == {tiny_run.weights[5]}
    assert seen["optimizer"][2] != tiny_run.weights[5]


def test_the_first_step_that_differs_ends_the_way_and_is_named(tiny_run, monkeypatch):
    real = objective.policy_loss
    monkeypatch.setattr(objective, "policy_loss", lambda *a, **o: (1.001 * (r := real(*a, **o))[0], r[1]))
    report, seen = go(tiny_run, 7)
    assert seen == []
    assert (report.reached, report.faithful, report.first_different.step) == (False, False, 4)
    assert len(report.replayed) == 1
    report, seen = go(tiny_run, 7, keep_going=True)
    assert len(seen) == 1
    assert (report.reached, report.faithful, len(report.replayed)) == (True, False, 3)
    assert "model.embed_tokens.weight" in report.wrong_parameters


def test_a_step_that_ends_after_the_visit_is_compared_too(tiny_run):
    report, seen = go(tiny_run, 9, finish_step=True, stage="backward")
    assert len(seen) == 1
    assert [result.step for result in report.replayed] == [8, 9]
    assert report.faithful


def test_a_shell_on_several_ranks_runs_each_line_everywhere_and_marks_what_differs(monkeypatch, capsys):
    lines = iter(["rank_of_twin = 1", "print('from', 0)"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or raise_end())
    printed = []

    def gather(value):
        printed.append(value)
        return [
            value,
            value.replace("0", "1") if value and "from" in value and "print" not in value else value,
        ]

    console = LockstepConsole({}, 0, gather)
    console.interact(banner="hello", exitmsg="")
    output = capsys.readouterr()
    assert output.out == "from 0\n[rank 1] from 1\n"
    assert "hello" in output.err
    assert printed[0] == "rank_of_twin = 1"
    assert printed[-1] is None  # the end of file reached all ranks


def test_a_rank_that_has_no_terminal_runs_what_rank_zero_reads(capsys):
    lines = iter(["x = 6 * 7", "", None])
    names = {}
    console = LockstepConsole(names, 1, lambda value: [next(lines) if value is None else value])
    console.interact(banner="", exitmsg="")
    assert names["x"] == 42
    assert capsys.readouterr().out == ""


def raise_end():
    raise EOFError
