"""Going to a step restores the state of the run there, or reports why it cannot."""

from types import SimpleNamespace

import pytest
import torch

from areal_core.trainer import objective
from areal_debug.goto.shell import LockstepConsole
from replayer.crosscheck.opinions import find_model
from replayer.crosscheck.step_rows import Origin
from replayer.goto import goto
from replayer.step_weights import plain_name

from .conftest import digest_weights


def go(run, step, look=lambda scene: None, **options):
    seen = []
    report = goto(run.path, step, lambda scene: seen.append(look(scene)), **options)
    return report, seen


@pytest.mark.parametrize(
    ("step", "anchor", "replayed"),
    [
        (7, 4, 3),
        pytest.param(0, None, 0, marks=pytest.mark.long),
        pytest.param(4, 4, 0, marks=pytest.mark.long),
    ],
)
def test_the_weights_at_a_step_are_those_of_the_run_bit_for_bit(tiny_run, step, anchor, replayed):
    report, seen = go(tiny_run, step, lambda scene: digest_weights(scene.trainer))
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


def raise_end():
    raise EOFError


def test_names_of_files_and_of_modules_are_of_one_weight():
    names = ("model.layers.0.w", "model.language_model.layers.0.w", "language_model.model.layers.0.w")
    assert {plain_name(name) for name in names} == {"layers.0.w"}
    assert plain_name("model.visual.merger.w") == plain_name("visual.merger.w")


def test_a_vision_model_is_not_recomputed(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "vision_config": {}}')
    origin = Origin("r", {"actor": {}}, None, str(tmp_path), {}, starts_from_model=True)
    rows = SimpleNamespace(origin=origin, tensors={})
    found = find_model(rows, SimpleNamespace(trainer=None, dtype="float32"), None)
    assert found == (None, "a vision model was trained, which is not recomputed here")
