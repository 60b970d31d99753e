"""The doctor on supervised runs, with our metric names and those of TRL and verl."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from .runs import TABLES, around, diagnosed, ramp, said, write_stats

SFT, DPO, TRL_DPO, VERL_SFT = (TABLES[name] for name in ("SFT", "DPO", "TRL_DPO", "VERL_SFT"))
WITH_REJECTED = TRL_DPO | {"rejected_reward": "rewards/rejected"}
T = np.arange(200)


def learning(seed: int = 0) -> dict[str, np.ndarray]:
    """Columns of a run that learns: falling losses, rising preference accuracy and rewards."""
    falls = 0.4 + np.exp(-ramp(0.0, 3.0, 0.0))
    return {
        "loss": around(falls, 0.08, seed),
        "eval_loss": around(falls + 0.05, 0.02, seed + 1),
        "preference_accuracy": np.clip(around(ramp(0.55, 0.9, 0.0), 0.05, seed + 2), 0, 1),
        "chosen_reward": around(ramp(0.0, 0.5, 0.0), 0.05, seed + 3),
        "grad_norm": np.exp(around(-1.0, 0.3, seed + 4)),
    }


def examined(tmp_path, run, names):
    folder = write_stats(tmp_path, {quantity: run[quantity] for quantity in names}, names)
    return diagnosed(folder)


@pytest.mark.parametrize(
    ("names", "family"), [(SFT, "AReaL"), (DPO, "AReaL"), (TRL_DPO, "TRL"), (VERL_SFT, "unknown")]
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 5))])
def test_supervised_run_that_learns_is_healthy(tmp_path, seed, names, family):
    code, found = examined(tmp_path, learning(10 * seed), names)
    assert (code, found["verdict"], found["alarms"], found["names_of"]) == (0, "healthy", [], family)
    assert set(found["judged"]) == set(names)


@pytest.mark.parametrize("names", [DPO, TRL_DPO])
@pytest.mark.parametrize(
    ("alarm", "changes"),
    [
        ("D06", {"loss": around(1.4, 0.08), "eval_loss": around(1.4, 0.02)}),
        ("D07", {"eval_loss": around(0.6 + np.abs(ramp(-0.6, 0.6, 0.0)), 0.02)}),
        ("D08", {"preference_accuracy": np.clip(around(0.47, 0.02), 0, 0.5)}),
        ("D08", {"preference_accuracy": around(0.5, 0.05)}),
        ("D08", {"preference_accuracy": around(0.55, 0.02)}),
        ("D09", {"chosen_reward": around(ramp(0.0, -2.0, 0.2), 0.05)}),
        ("D41", {"loss": around(0.2 + np.abs(ramp(-1.4, 1.3, 0.0)), 0.02)}),
        ("D45", {"eval_loss": learning()["eval_loss"] / 8}),
    ],
)
def test_trouble_of_supervised_training_is_named_alone(tmp_path, alarm, changes, names):
    code, found = examined(tmp_path, learning() | changes, names)
    assert (code, [one["id"] for one in found["alarms"]]) == (1, [alarm])
    assert all(found["alarms"][0][part] for part in ("found", "evidence", "advice", "experiment", "source"))


HELD_OUT = tomllib.loads(Path(__file__).with_name("posts.toml").read_text(encoding="utf-8"))["held_out"]


@pytest.mark.parametrize(("measured", "alarms"), HELD_OUT)
def test_few_measurements_of_the_held_out_loss_must_all_be_clearly_worse(tmp_path, measured, alarms):
    folder = write_stats(tmp_path, {"loss": learning()["loss"]}, SFT)
    file = folder / "stats.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row, value in zip(rows[30::30], measured, strict=False):
        row[SFT["eval_loss"]] = value
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [alarm["id"] for alarm in diagnosed(folder)[1]["alarms"]] == alarms


def test_the_loss_of_a_policy_with_a_reward_is_not_judged(tmp_path):
    names = {"loss": "loss", "reward": "reward"}
    run = learning() | {"loss": around(0.0, 0.01), "reward": around(ramp(0.2, 0.7, 0.0), 0.05)}
    code, found = examined(tmp_path, run, names)
    assert (code, found["verdict"], found["alarms"]) == (2, "unknown", [])  # two columns prove little


@pytest.mark.parametrize(
    ("name", "values", "alarm"), [("loss", around(1.4, 0.08), "D06"), ("reward", around(0.4, 0.05), "D01")]
)
def test_a_level_late_in_a_run_is_no_finding(tmp_path, name, values, alarm):
    file = write_stats(tmp_path, {name: values}, {name: name}) / "stats.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for later, expected in ((0, True), (5000, False)):
        file.write_text("".join(json.dumps(row | {"step": row["step"] + later}) + "\n" for row in rows))
        _, found = diagnosed(tmp_path)
        assert (alarm in {one["id"] for one in found["alarms"]}) == expected
        assert found["verdict"] == ("problem" if expected else "unknown")
    stays = f"Inconclusive: the {name} stays between {values.min():.3g} and {values.max():.3g}, and may have changed "
    assert said(tmp_path).startswith(stays)
    assert " before step 5000: give" in said(tmp_path)


FALLEN = around(ramp(0.0, -2.0, 0.2), 0.05)


@pytest.mark.parametrize(
    ("chosen", "rejected", "alarms"),
    [
        (FALLEN, around(ramp(0.0, -6.0, 0.2), 0.05), []),
        (FALLEN, around(ramp(0.0, -2.4, 0.2), 0.05), ["D09"]),
        # SimPO and ORPO have no reference: both begin below 0, and are judged by their change.
        (around(ramp(-1.9, -2.35, 0.0), 0.05), around(ramp(-2.0, -3.35, 0.0), 0.05, 9), []),
        (around(ramp(-1.9, -1.93, 0.0), 0.05), around(ramp(-2.0, -1.98, 0.0), 0.05, 9), []),
        (around(ramp(-1.9, -20.0, 0.0), 0.05), around(ramp(-2.0, -26.0, 0.0), 0.05, 9), ["D09"]),
    ],
)
def test_chosen_answers_may_fall_if_rejected_ones_fall_much_further(tmp_path, chosen, rejected, alarms):
    run = learning() | {"chosen_reward": chosen, "rejected_reward": rejected}
    found = examined(tmp_path, run, WITH_REJECTED)[1]["alarms"]
    assert [one["id"] for one in found] == alarms


SCORES = {"loss": "loss", "preference_accuracy": "accuracy", "reward": "mean_reward", "grad_norm": "margin"}


@pytest.mark.parametrize(
    ("columns", "judged"),
    [
        ({"loss": "loss", "preference_accuracy": "accuracy"}, {"loss"}),  # of tokens
        ({"of_two": "loss", "preference_accuracy": "eval_accuracy"}, {"loss", "preference_accuracy"}),
        ({"reward": "reward", "preference_accuracy": "accuracy_reward"}, {"reward"}),  # a term
        (SCORES, {"loss", "preference_accuracy"}),  # of a reward model: their level means nothing
    ],
)
def test_accuracy_is_that_of_pairs_only_where_pairs_are_logged(tmp_path, columns, judged):
    run = learning() | {"preference_accuracy": around(0.3, 0.02), "reward": around(ramp(0.2, -0.6, 0.0))}
    run["of_two"] = around(ramp(0.69, 0.4, 0.0), 0.01)
    _, found = examined(tmp_path, run, columns)
    assert set(found["judged"]) == judged
    assert ("D08" in [alarm["id"] for alarm in found["alarms"]]) == ("preference_accuracy" in judged)


def test_a_loss_that_loses_all_it_had_learned_in_one_step_is_named_from_there(tmp_path):
    back = np.where(np.arange(200) < 120, learning()["loss"], around(ramp(2.0, 0.9, 0.6), 0.05))
    for loss, at in ((back, [120]), (learning()["loss"], [])):
        _, found = examined(tmp_path, {"loss": loss}, {"loss": "loss"})
        named = [
            one["onset"] for one in found["alarms"] if one["title"].endswith("back above where it began")
        ]
        assert named == at


def test_a_loss_that_jumps_inside_an_epoch_may_be_a_resume(tmp_path):
    up, dip = np.where(T < 120, 0.5, 0.8), np.where((T >= 80) & (T < 150), 0.35, 0.5)
    stairs = np.where(T < 80, 0.5, np.where(T < 150, 0.35, 0.25))  # as epochs begin: sound
    for level, epoch, steps in ((up, 100, [120]), (up, 60, []), (dip, 400, [80]), (stairs, 400, [])):
        run = {"loss": level + around(ramp(0.4, 0.0, 0.0) ** 4, 0.004), "epoch": T / epoch}
        alarms = examined(tmp_path, run, {"loss": "loss", "epoch": "epoch"})[1]["alarms"]
        assert [one["onset"] for one in alarms[:1] if "resumed" in one["advice"][0]] == steps


def test_values_that_are_printed_as_one_number_leave_the_noise_before_them(tmp_path):
    for seed in range(5):
        run = {"loss": np.where(T < 40, 0.5 + around(0, 0.06, seed), 0.5), "epoch": T / 400}
        found = examined(tmp_path, run, {"loss": "loss", "epoch": "epoch"})[1]["alarms"]
        assert "D42" not in [one["id"] for one in found]


def test_a_loss_that_does_not_fall_with_a_gradient_of_nothing_points_to_half_precision(tmp_path):
    run = {"loss": around(1.4, 0.08), "grad_norm": np.full(200, 2e-9)}
    _, found = examined(tmp_path, run, {"loss": "loss", "grad_norm": "grad_norm"})
    [alarm] = found["alarms"]
    assert (alarm["id"], "fp16" in alarm["advice"][0], "2e-09" in alarm["found"]) == ("D06", True, True)


@pytest.mark.parametrize(("held_out", "alarms"), [(0.3, []), (0.0, ["D06"])])
def test_a_loss_of_new_rows_is_judged_by_the_held_out_loss(tmp_path, held_out, alarms):
    run = {
        "loss": around(ramp(1.75, 1.7, 0.0), 0.15),
        "eval_loss": around(1.7 - ramp(0, held_out, 0.0), 0.01),
    }
    found = examined(tmp_path, run, {"loss": "loss/train", "eval_loss": "loss/eval"})[1]["alarms"]
    assert [one["id"] for one in found] == alarms
