"""What the doctor needs before it says something: exact values, checks, more than a draw."""

import json

import numpy as np
import pytest

from areal_debug.doctor.alarm import alarm
from areal_debug.doctor.examine import causes_first, examine
from areal_debug.doctor.read import Run, judged
from areal_debug.doctor.series import Series

from .runs import diagnosed, said

STEPS = 100
X = np.linspace(0, 1, STEPS)


def scattered(level, size=0.02, seed=0):
    return level + size * np.random.default_rng(seed).normal(size=STEPS)


# Columns of TRL of a run that learns.
SOUND = {
    "reward": scattered(0.2 + 0.5 * X),
    "grad_norm": np.abs(scattered(0.3)),
    "learning_rate": np.full(STEPS, 1e-6),
    "entropy": scattered(1.0 - 0.3 * X),
    "kl": np.abs(scattered(0.02 * X, 0.002)),
    "clip_ratio": np.abs(scattered(0.03)),
    "completions/mean_length": scattered(300.0, 9),
    "completions/clipped_ratio": np.abs(scattered(0.01, 0.005)),
    "frac_reward_zero_std": np.abs(scattered(0.1)),
}


BROKEN = np.where(X < 0.5, scattered(0.3), np.nan)


def examined(run, family="TRL", every=1):
    series = {name: Series(name, every * np.arange(len(values)), values) for name, values in run.items()}
    run = Run("run", "run", family, judged(series), series, {})
    return run, examine(run)


def ids(run):
    logged = {name: values for name, values in run.items() if len(values)}
    return [alarm.id for alarm in examined(logged)[1].alarms]


def write_log(file, line_of):
    file.write_text("".join(line_of(step) + "\n" for step in range(60)))
    return file


@pytest.mark.parametrize(("printed", "expected"), [("0.000", []), ("0.0", ["D13"]), ("0e-07", ["D13"])])
def test_a_number_that_is_rounded_to_0_is_not_0(printed, expected, tmp_path):
    line = f"step:{{}} - critic/score/mean:{{:.3f}} - actor/lr:{printed} - actor/entropy:0.512"
    _, found = diagnosed(write_log(tmp_path / "train.log", lambda step: line.format(step, 0.3 + step / 200)))
    assert [alarm["id"] for alarm in found["alarms"]] == expected
    assert ("D13" in found["checks"]["unobserved"]) == (not expected)


def test_few_checks_are_no_health(tmp_path):
    file = write_log(tmp_path / "run.jsonl", lambda step: json.dumps({"step": step, "reward": step / 60}))
    code, found = diagnosed(file)
    assert (code, found["verdict"], found["alarms"]) == (2, "unknown", [])
    assert found["checks"]["unobserved"]["D24"] == ["logprob_difference|k3|behave_kl"]
    assert set(found["checks"]["passed"]) == {"D01", "D02", "D04", "D05", "D18", "D45"}
    shown = said(file)
    assert shown.startswith("Inconclusive: 6 checks found no problem; 42 others could not run, ")


@pytest.mark.parametrize(
    ("expected", "changed"),
    [
        ([], {}),
        (["D44"], {"kl": scattered(-5 * X, 0.1)}),
        ([], {"kl": scattered(np.zeros(STEPS), 0.002)}),  # an estimate around 0
        (["D28"], {"value_loss": scattered(4 + 3 * X, 0.3)}),
        ([], {"kl": np.zeros(STEPS), "grad_norm": np.zeros(0)}),  # none is configured, as far as is known
        (
            ["D01", "D32"],
            {"kl": np.zeros(STEPS), "grad_norm": np.zeros(0), "reward": 0.3 + 0 * X},
        ),  # behind others
        (["D17"], {"kl": np.zeros(STEPS), "grad_norm": np.full(STEPS, np.nan)}),
        (["D29"], {"kl": np.exp(scattered(14, 2))}),  # of millions from the first step on
        (["D55", "D16", "D01"], {"num_turns/mean": 2 + np.exp(-9 * X), "reward": scattered(0.4)}),
        (["D33"], {"advantages/max": 0 * X, "advantages/min": 0 * X, "reward_std": scattered(0.4)}),
        (["D16", "D01"], {"num_turns/mean": 6 - X, "reward": scattered(0.4)}),
        (["D24"], {"training/rollout_probs_diff_mean": 0 * X + 2e-06, "rollout_corr/k3_kl": 0.05 + 0 * X}),
        ([], {"value_loss": scattered(0.05 + 0.2 * X, 0.005), "reward": scattered(0.05 + 0.4 * X)}),
        ([], {"value_loss": scattered(1 + 2 * np.minimum(X, 0.3))}),  # it levels off
        ([], {"value_loss": scattered(4 + 30 * X, 0.3), "reward": scattered(90 + 900 * X, 9)}),  # of returns
        (["D45"], {"completions/max_length": np.full(STEPS, 200.0)}),  # below the mean
        (["D45"], {"len/mean": SOUND["completions/mean_length"], "len/max": np.full(STEPS, 200.0)}),
        ([], {"len/mean": SOUND["completions/mean_length"], "len/max": np.full(STEPS, 400.0)}),
        (["D24"], {"sampling/sampling_logp_difference/mean": scattered(0.08, 0.005)}),
        (["D20"], {"completions/clipped_ratio": scattered(np.where(X > 0.9, 0.6, 0.01), 0.005)}),
        ([], {"completions/clipped_ratio": scattered(np.where(X > 0.94, 0.6, 0.01), 0.005)}),  # six steps
        ([], {"completions/clipped_ratio": scattered(0.075, 0.005)}),  # usual where it stays
        (["D20"], {"completions/clipped_ratio": scattered(0.04 + 0.04 * X, 0.002)}),
        ([], {"entropy": np.zeros(0), "entropy_loss": scattered(-8 + 10 * X, 0.2)}),  # of a density
        ([], {"rewards/length_penalty/mean": np.zeros(STEPS)}),  # none was due
        ([], {"entropy": np.zeros(0), "losses/entropy": scattered(-1 - 3 * X, 0.2)}),
        (["D04"], {"reward": scattered(np.where(X > 0.9, 0.1, 0.2 + 0.5 * X))}),
        (["D05"], {"reward": scattered(0.45 + 0.07 * np.minimum(1, 5 * X))}),  # little, of all there is
        ([], {"reward": scattered(0.45 + 0.12 * X)}),
        (["D16", "D01"], {"reward": 0.3 + 0 * X}),  # no gain that has levelled off
        ([], {"reward": 0 * X, "teacher_kl": scattered(0.3 - 0.2 * X)}),  # of distillation
        (["D18"], {"loss": BROKEN, "grad_norm": BROKEN}),  # computed from the loss
        (["D17", "D18"], {"loss": BROKEN, "grad_norm": np.append(BROKEN[1:], np.nan)}),
    ],
)
def test_a_rule_needs_what_contradicts_a_sound_run(expected, changed):
    assert ids(SOUND | changed) == expected


def test_a_level_without_a_trend_is_a_warning():
    level = {"sampling/sampling_logp_difference/mean": scattered(0.08, 0.005)}
    assert [alarm.severity for alarm in examined(SOUND | level)[1].alarms] == ["warning"]
    rises = {"sampling/sampling_logp_difference/mean": scattered(0.01 + 0.07 * X, 0.002)}
    assert [alarm.severity for alarm in examined(SOUND | rises)[1].alarms] == ["error"]


def test_every_validation_set_is_judged():
    sets = {
        "val-core/gsm8k/acc/mean@1": scattered(0.5 + 0.3 * X),
        "val-core/MATH/acc/mean@1": np.zeros(STEPS),
    }
    _, found = examined(SOUND | sets)
    assert [alarm.id for alarm in found.alarms] == ["D32"]
    assert "val-core/MATH/acc/mean@1: 0" in found.alarms[0].found
    sets["val-core/MATH/acc/mean@1"] = scattered(0.6 - 0.4 * X)
    assert [alarm.metric for alarm in examined(SOUND | sets)[1].alarms] == ["val-core/MATH/acc/mean@1"]


def sound_rewards(rng, steps):
    """Yield rewards of ten shapes that do not fall."""
    rise = 1 - np.exp(-3 * np.linspace(0, 1, steps))
    drift = np.zeros(steps)
    for i in range(1, steps):
        drift[i] = 0.8 * drift[i - 1] + rng.normal(0, 0.05)
    yield rng.binomial(64, 0.005, steps) / 64
    yield rng.binomial(16, 0.02, steps) / 16
    yield np.where(rng.random(steps) < 0.7, 0, rng.uniform(0, 1, steps))
    yield np.where(rng.random(steps) < 0.9, 0.0, 1.0)
    yield rng.binomial(32, 0.2 + 0.5 * rise) / 32
    yield rng.binomial(64, 0.002 + 0.05 * rise) / 64
    yield rng.normal(3 * rise - 1, 0.3)
    yield rise + 0.1 * rng.standard_t(2, steps)
    yield 0.2 + 0.4 * rise + drift
    yield (0.5 + 0.5 * rise) * rng.lognormal(0, 0.5, steps)


@pytest.mark.long
def test_at_most_one_of_200_sound_rewards_fell_after_a_peak():
    accused = [
        "D04" in ids({"reward": np.asarray(reward, np.float64)})
        for seed in range(20)
        for steps in (60, 200)
        for reward in sound_rewards(np.random.default_rng(seed), steps)
    ]
    assert (len(accused), sum(accused) <= 2) == (400, True)


def test_the_cause_comes_before_what_follows_from_it():
    collapse = {
        "sampling/sampling_logp_difference/mean": 0.01 * np.exp(4 * np.maximum(0, X - 0.4)),
        "completions/clipped_ratio": np.clip(3 * (X - 0.6), 0.01, 0.9),
        "reward": scattered(np.where(X < 0.6, 0.5, 0.5 - 1.2 * (X - 0.6))),
    }
    found = [alarm.id for alarm in examined(SOUND | collapse)[1].alarms]
    assert found[0] == "D24"
    assert {"D20", "D04"} <= set(found)
    _, gravest = examined(SOUND | collapse)
    assert [alarm.id for alarm in causes_first(reversed(gravest.alarms), STEPS, {})] == found


def test_a_cause_comes_before_a_flat_reward_and_may_begin_a_tenth_of_the_run_later():
    kl = 0.02 * np.exp(60 * np.maximum(0, X - 0.85)) + scattered(0, 1e-3)
    for reward, every in ((0.3 + 0 * X, 1), (0.2 + 0.5 * X - np.where(X > 0.84, 0.4, 0), 50)):
        _, found = examined(SOUND | {"reward": scattered(reward), "kl": kl}, every=every)
        first = next(alarm.id for alarm in found.alarms if alarm.id in ("D01", "D04", "D29"))
        assert (first, len(found.alarms) > 1) == ("D29", True)


@pytest.mark.parametrize(
    ("cause", "since", "every", "first", "at"),
    [
        *(("D03", 130, 25, "D03", 100), ("D03", 130, 1, "D22", 100), ("D03", 160, 25, "D22", 100)),
        *(("D21", 100, 1, "D22", 100), ("D03", 80, 1, "D03", 0), ("D03", 80, 1, "D22", 1)),
    ],
)
def test_a_cause_may_begin_between_two_values_of_its_metric(cause, since, every, first, at):
    """An evaluation every 25 steps shows a fall 25 steps late; longer answers do not make groups equal.

    What changes from the first step on has no bend that says when it began.
    """
    series, alike = (
        Series("seen", every * np.arange(20), np.zeros(20)),
        Series("alike", np.arange(9), np.ones(9)),
    )
    effect = alarm("D22", alike, found="", variant="wrong", since=at)
    found = alarm(cause, series, found="", title="falls" if cause == "D03" else "nothing", since=since)
    assert next(causes_first([effect, found], 200, {"seen": series, "alike": alike})).id == first


def test_a_supervised_run_is_not_told_about_groups():
    lengths = {"record/length": scattered(300.0, 9)}  # of a record; the reward has no values there
    _, found = examined({"loss": scattered(2.0 + 0 * X), "grad_norm": np.zeros(STEPS)} | lengths)
    assert found.alarms[0].id == "D13"
    assert "requires_grad" in found.alarms[0].advice[0]
    assert not any("group" in advice for alarm in found.alarms for advice in alarm.advice)
