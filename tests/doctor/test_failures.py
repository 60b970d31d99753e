"""Each failure by its own series: the alarm and its first step. Its sound twin gets none."""

import json

import numpy as np
import pytest

from areal_debug.doctor.examine import examine
from areal_debug.doctor.onset import onset
from areal_debug.doctor.read import read_run
from areal_debug.doctor.rules.mismatch import explain_growth
from areal_debug.doctor.series import Series

from .runs import OURS, STEPS, TABLES, around, healthy, ramp, write_stats

NAMES = OURS | TABLES["names"] | {f"position {i}": f"kl_by_position/{i}" for i in range(4)}
BEGIN = 120  # of most failures here, of 200 steps
AFTER = np.arange(STEPS) >= BEGIN
SINCE = np.maximum(0, np.arange(STEPS) - BEGIN) / (STEPS - BEGIN)  # 0 to 1 after the beginning
X = np.linspace(0, 1, STEPS)
SINGLE = np.arange(STEPS) % 40 == 31
CORRELATED = [np.convolve(around(0, 0.08, seed), np.ones(9) / 3, "same") for seed in (1, 5)]
FOR_A_TIME = (np.arange(STEPS) >= 60) & (np.arange(STEPS) < 90)


def noisy(level, size, seed=3):
    return around(level, size, seed)


def without(run, *names):
    return {name: values for name, values in run.items() if name not in names}


def without_mismatch(run, staleness):
    """Leave out (None) what measures the difference directly: the decoupled loss remains."""
    names = ("logprob_difference", "k3", "behave_imp_weight")
    return {name: None for name in names if name in run} | {"staleness": np.full(STEPS, float(staleness))}


def judged(folder, run, names=NAMES):
    logged = {name: values for name, values in run.items() if values is not None}
    return examine(read_run(write_stats(folder, logged, names)))


# Each failure: its alarm, a word of its title, its first step (None: any), and what it changes of a run `r`.
FAILURES = {
    "plateau": (
        "D05",
        "levelled",
        30,
        lambda r: {"reward": noisy(0.2 + 0.3 / (1 + np.exp(-(X - 0.08) / 0.02)), 0.02)},
    ),
    "noise beside the gain": ("D02", "noisy", None, lambda r: {"reward": noisy(ramp(0.2, 0.6, 0.0), 0.25)}),
    "clipping triples": (
        "D12",
        "saturates",
        BEGIN,
        lambda r: {"clip_ratio": noisy(np.where(AFTER, 0.27, 0.05), 0.01)},
    ),
    "entropy rises": (
        "D19",
        "rises",
        BEGIN,
        lambda r: {"entropy": noisy(1 + SINCE, 0.03), "reward": noisy(0.2 + 0.4 * np.minimum(X, 0.6), 0.03)},
    ),
    "entropy explodes": ("D19", "explodes", BEGIN, lambda r: {"entropy": noisy(1 + 5 * SINCE, 0.03)}),
    "few gradients of great size": (
        "D17",
        "spike",
        41,
        lambda r: {"grad_norm": np.where(np.isin(np.arange(STEPS), (41, 90, 160)), 60, 1) * r["grad_norm"]},
    ),
    "all right": (
        "D22",
        "nearly all answers are right",
        BEGIN,
        lambda r: {
            "reward": noisy(ramp(0.6, 0.97, 0.1), 0.003),
            "zero_variance_groups": noisy(0.3 + 0.55 * AFTER, 0.02),
        },
    ),
    "all wrong": (
        "D22",
        "nearly all answers are wrong",
        0,
        lambda r: {"reward": np.abs(noisy(0.03, 0.01)), "zero_variance_groups": noisy(0.8, 0.02)},
    ),
    "groups lose their spread though the reward rises": (
        "D22",
        "equal rewards",
        40,
        lambda r: {
            "zero_variance_groups": noisy(ramp(0.05, 0.75, 0.2), 0.02),
            "reward": noisy(ramp(0.3, 0.6, 0.0), 0.02),
        },
    ),
    "a third each": (
        "D22",
        "right ones and wrong ones",
        0,
        lambda r: {"zero_variance_groups": noisy(0.9, 0.02), "reward": noisy(ramp(0.4, 0.55, 0.0), 0.01)},
    ),
    "KL while the reward rises": (
        "D29",
        "explodes",
        BEGIN,
        lambda r: {"reference_kl": np.abs(noisy(0.02, 0.002)) * np.exp(5 * SINCE)},
    ),
    "KL at one position": (
        "D30",
        "positions",
        BEGIN,
        lambda r: {
            **{f"position {i}": np.abs(noisy(0.03 + 0.5 * SINCE * (i == 2), 0.004, i)) for i in range(4)}
        },
    ),
    "format pays": (
        "D31",
        "format",
        BEGIN,
        lambda r: {
            "format": noisy(0.3 + 0.7 * np.minimum(1, 2 * SINCE), 0.01),
            "task": noisy(0.2, 0.01),
            "reward": 0.2 + 0.5 * noisy(0.3 + 0.7 * np.minimum(1, 2 * SINCE), 0.01),
        },
    ),
    "a term never pays": ("D32", "always 0", 0, lambda r: {"format": np.zeros(STEPS), "task": r["reward"]}),
    "a term pays all": ("D32", "never", 0, lambda r: {"format": np.full(STEPS, 0.5), "task": r["reward"]}),
    "advantages": ("D33", "advantages", BEGIN, lambda r: {"advantage_std": noisy(1 - 0.95 * AFTER, 0.02)}),
    "rewards of equal size": (
        "D33",
        "spread of rewards",
        BEGIN,
        lambda r: {"reward_std": noisy(0.4 - 0.38 * AFTER, 0.01)},
    ),
    "advantages between bounds": (
        "D33",
        "advantages",
        BEGIN,
        lambda r: {
            "advantage_max": noisy(2 - 1.9 * AFTER, 0.03),
            "advantage_min": -noisy(2 - 1.9 * AFTER, 0.03, 4),
        },
    ),
    "some steps without a gradient": (
        "D34",
        "no gradient",
        7,
        lambda r: {"grad_norm": r["grad_norm"] * ~((np.arange(STEPS) % 5 == 2) & (np.arange(STEPS) >= 7))},
    ),
    "repetition": ("D35", "repeat", BEGIN, lambda r: {"repetition": np.abs(noisy(0.02 + 0.5 * SINCE, 0.01))}),
    "slower steps": ("D36", "slower", BEGIN, lambda r: {"step_time": noisy(20 + 25 * SINCE, 0.5)}),
    "memory": ("D37", "creeps", 0, lambda r: {"host_memory": noisy(50 + 40 * X, 0.3)}),
    "a filter hides it": (
        "D38",
        "filter",
        None,
        lambda r: {"generated_reward": noisy(0.25, 0.02), "reward": noisy(ramp(0.3, 0.7, 0.0), 0.02)},
    ),
    "short answers": (
        "D40",
        "short",
        BEGIN,
        lambda r: {
            "length": noisy(300 - 260 * np.minimum(1, 3 * SINCE), 5),
            "reward": noisy(0.3, 0.02),
            "eval_reward": None,
        },
    ),
    "length is rewarded": (
        "D21",
        "validation does not follow",
        BEGIN,
        lambda r: {"length": noisy(300 + 500 * SINCE, 10), "eval_reward": noisy(0.3, 0.03)},
    ),
    "length explodes": (
        "D21",
        "explode",
        BEGIN,
        lambda r: {
            "length": noisy(300 + 1200 * SINCE, 10),
            "no_eos": np.abs(noisy(0.003 + 0.15 * SINCE, 0.002)),
        },
    ),
    "validation after its peak": (
        "D03",
        "validation does not follow",
        None,
        lambda r: {"eval_reward": noisy(0.2 + np.minimum(X, 0.4) - np.maximum(0, X - 0.4) / 2, 0.02)},
    ),
    "validation falls": (
        "D03",
        "falls",
        BEGIN,
        lambda r: {"eval_reward": noisy(0.5 - 0.4 * SINCE, 0.01), "reward": noisy(0.5, 0.02)},
    ),
    "critic diverges": (
        "D28",
        "diverges",
        BEGIN,
        lambda r: {"value_loss": noisy(0.2 + 0.6 * np.exp(-6 * X) + 2 * SINCE, 0.01)},
    ),
    "another model from a step on": (
        "D42",
        "step 120",
        BEGIN,
        lambda r: {
            "entropy": noisy(1 - 0.4 * X + 0.3 * AFTER, 0.03),
            "reward": noisy(0.2 + 0.6 * X - 0.3 * AFTER, 0.04),
        },
    ),
    "mismatch grows": (
        "D24",
        "drift apart",
        BEGIN,
        lambda r: {"logprob_difference": noisy(0.011 + 0.012 * SINCE, 0.0005)},
    ),
    "an engine that rounds, seen by the decoupled loss": (
        "D24",
        "disagree",
        None,
        lambda r: {**without_mismatch(r, 0), "behave_kl": noisy(-0.003, 0.005)},
    ),
    "single batches of another policy": (
        "D43",
        "did not generate",
        31,
        lambda r: {
            "approx_kl": np.where(SINGLE, noisy(-6.0, 1.0), noisy(-0.004, 0.003)),
            "importance_weight": np.where(SINGLE, 0.05, noisy(1.0, 0.002)),
        },
    ),
    "critic diverges and comes back to nothing": (
        "D28",
        "explodes",
        60,
        lambda r: {
            "value_loss": np.where(FOR_A_TIME, noisy(20.0, 3.0), noisy(0.2, 0.02)),
            "explained_variance": np.where(FOR_A_TIME, noisy(-30.0, 5.0), noisy(0.1, 0.05)),
        },
    ),
    "critic is multiplied from a step on": (
        "D28",
        "grows",
        BEGIN,
        lambda r: {"explained_variance": None, "value_loss": np.exp(noisy(18 * SINCE, 0.1))},
    ),
    "critic stays a constant": ("D28", "nothing", 0, lambda r: {"explained_variance": noisy(0.0, 0.004)}),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("seed", [0, pytest.param(7, marks=pytest.mark.long)])
def test_failure_is_named_with_its_onset_its_cost_and_its_source(tmp_path, name, seed):
    expected, word, begins, change = FAILURES[name]
    run = healthy(seed)
    found = judged(tmp_path, run | change(run))
    alarm = next((one for one in found.alarms if one.id == expected and word in one.title), None)
    assert alarm is not None, [(one.id, one.title) for one in found.alarms]
    assert alarm.evidence
    assert alarm.advice
    assert alarm.experiment
    assert alarm.source
    assert alarm.cost
    if begins is not None:
        assert abs(alarm.onset - begins) <= 0.06 * STEPS, alarm.onset


SOUND = {
    "reasoning gets longer and validation follows": lambda r: {"length": noisy(300 + 900 * X, 20)},
    "entropy rises with the reward": lambda r: {"entropy": noisy(ramp(0.5, 0.9, 0.0), 0.03)},
    "KL grows with the reward": lambda r: {
        "reference_kl": np.abs(noisy(0.004 + 0.3 * (1 - np.exp(-3 * X)), 0.005))
    },
    "longer steps for longer completions": lambda r: {
        "step_time": noisy(20 + 40 * X, 0.8),
        "length": noisy(300 + 600 * X, 15),
    },
    "memory fills and stays": lambda r: {"host_memory": noisy(50 + 40 * (1 - np.exp(-10 * X)), 0.3)},
    "gradient norms with heavy tails": lambda r: {"grad_norm": np.exp(noisy(-1.0, 0.7))},
    "format is learned first": lambda r: {
        "format": noisy(0.3 + 0.7 * np.minimum(1, 5 * X), 0.02),
        "task": noisy(r["reward"], 0.01),
        "reward": r["reward"] + 0.1 * noisy(0.3 + 0.7 * np.minimum(1, 5 * X), 0.02),
    },
    "all positions drift alike": lambda r: {
        **{f"position {i}": np.abs(noisy(0.03 + 0.1 * X, 0.01, i)) for i in range(4)}
    },
    "stale samples": lambda r: {**without_mismatch(r, 1), "behave_kl": noisy(-0.02, 0.01)},
    "an engine in bfloat16": lambda r: {**without_mismatch(r, 0), "behave_kl": noisy(-0.0001, 0.0005)},
    "few tokens of an unbounded estimate": lambda r: {
        "approx_kl": np.where(SINGLE, 3.0, noisy(0.004, 0.003))
    },
    "returns begin to vary, and the critic predicts them": lambda r: {
        "value_loss": noisy(0.004 + 0.1 * AFTER, 0.0004),
        "explained_variance": noisy(0.2 + 0.3 * AFTER, 0.05),
    },
    "value loss rises while rewards begin": lambda r: {"value_loss": noisy(0.02 + 0.5 * X, 0.02)},
    "one bad step": lambda r: {
        "no_eos": np.where(X[150] == X, 0.9, r["no_eos"]),
        "grad_norm": r["grad_norm"] * np.where(X[80] == X, 50, 1),
    },
    "the last gain comes late": lambda r: {
        "reward": noisy(0.2 + 0.4 / (1 + np.exp(-(X - 0.75) / 0.08)), 0.03)
    },
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (7, 11))])
def test_sound_twin_of_a_failure_gets_no_alarm(tmp_path, name, seed):
    run = healthy(seed)
    found = judged(tmp_path, run | SOUND[name](run))
    assert [(one.id, one.title, one.found) for one in found.alarms] == []


@pytest.mark.parametrize("steps", [60, 500, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("every", [1, 5])
def test_run_that_learns_gets_no_alarm_at_any_length_or_logging_interval(tmp_path, steps, every):
    run = {name: values[::every] for name, values in healthy(steps, steps).items()}
    assert judged(tmp_path, run).alarms == ()


def test_length_that_suddenly_pays_is_named_without_validation(tmp_path):
    run = without(healthy(), "eval_reward")
    run |= {"length": noisy(300 + 700 * SINCE, 8), "reward": noisy(ramp(0.2, 0.5, 0.0) + 0.3 * SINCE, 0.01)}
    [alarm] = judged(tmp_path, run).alarms
    assert (alarm.id, "may be rewarded" in alarm.title) == ("D21", True)
    assert abs(alarm.onset - BEGIN) <= 12


def test_steps_that_validation_and_training_share_are_compared_when_only_four_were_evaluated(tmp_path):
    for name, later, expected in (
        ("behind", (0.30, 0.28, 0.27), ["D03"]),
        ("with it", (0.45, 0.55, 0.6), []),
    ):
        folder = write_stats(tmp_path / name, without(healthy(), "eval_reward"))
        file = folder / "stats.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for step, value in zip((0, 60, 120, 199), (0.22, *later), strict=True):
            rows[step]["eval-rollout/reward"] = value
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert [one.id for one in examine(read_run(folder)).alarms] == expected


def test_growth_of_the_mismatch_is_split_by_what_steps_show(tmp_path):
    rng = np.random.default_rng(1)
    length = 300 * np.exp(1.2 * X + rng.normal(0, 0.2, STEPS))
    entropy = noisy(0.6, 0.05)
    for power, drift, largest in ((1.0, 0.0, "longer completions"), (0.0, 1.2, "weights or staleness")):
        values = 0.01 * (length / 300) ** power * np.exp(drift * X + rng.normal(0, 0.03, STEPS))
        columns = healthy() | {"length": length, "entropy": entropy, "logprob_difference": values}
        run = read_run(write_stats(tmp_path / largest, columns))
        split = explain_growth(run, run.series["logprob_difference"])
        assert split.split("% is due to ")[1].startswith(largest)
        assert float(split.split("of the growth, ")[1].split(" %")[0]) == pytest.approx(100, abs=12)
    assert "cannot be split" in explain_growth(
        read_run(write_stats(tmp_path / "still", healthy() | {"length": 300 + 300 * X, "entropy": entropy})),
        Series("x", np.arange(STEPS), np.exp(X + rng.normal(0, 0.3, STEPS))),
    )


@pytest.mark.parametrize("steps", [40, 200, pytest.param(3000, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("shape", "worse"),
    [
        (lambda x: 5 * np.maximum(0, x - 0.6), "up"),
        (lambda x: np.where(x < 0.6, 1.0, 3.0), "up"),
        (lambda x: -np.minimum(1, 8 * np.maximum(0, x - 0.6)), "down"),
        (lambda x: np.exp(-4 * x) - 3 * np.maximum(0, x - 0.6), "down"),
        (lambda x: np.exp(12 * np.maximum(0, x - 0.6)), "up"),
    ],
)
def test_onset_is_the_bend_or_the_jump(steps, shape, worse):
    x = np.linspace(0, 1, steps)
    values = shape(x) + 0.05 * np.random.default_rng(0).normal(size=steps)
    values[5] += 40  # an outlier
    assert onset(Series("x", np.arange(steps), values), worse) / steps == pytest.approx(0.6, abs=0.05)
    assert onset(Series("x", np.arange(steps), np.interp(x, [0, 0.3, 0.9, 1], [0, 3, 4, 5])), "up") == 0


@pytest.mark.parametrize(("steps", "at"), [(60, 39), (200, 120), (400, 250)])
def test_alarms_of_one_jump_name_the_same_step(tmp_path, steps, at):
    run, after = healthy(0, steps), np.arange(steps) >= at
    run |= {name: run[name] - 0.4 * after for name in ("reward", "eval_reward")}
    run |= {name: run[name] + 0.4 * after for name in ("clip_ratio", "approx_kl")}
    run |= {"length": run["length"] * np.where(after, 0.25, 1), "entropy": run["entropy"] * (1 - 0.9 * after)}
    alarms = judged(tmp_path, run, OURS).alarms
    assert {"D04", "D12", "D14", "D15", "D40", "D42"} <= {alarm.id for alarm in alarms}
    assert {alarm.onset for alarm in alarms} == {at}
    [fell] = [alarm for alarm in alarms if alarm.id == "D04"]
    assert fell.advice[0].startswith(f"go back to the checkpoint before step {at};")


def test_cost_counts_steps_and_the_hours_that_they_took(tmp_path):
    run = healthy() | {"no_eos": noisy(ramp(0.01, 0.3, 0.6), 0.003), "step_time": np.full(STEPS, 36.0)}
    [alarm] = judged(tmp_path, run).alarms
    num = STEPS - alarm.onset
    assert alarm.cost == f"{num} of {STEPS} steps, {0.01 * num:.2g} h"


PROGRESS = [
    lambda r: {"no_eos": noisy(0.14, 0.01)},
    lambda r: {"zero_variance_groups": noisy(0.7, 0.02), "reward": noisy(ramp(0.3, 0.6, 0.0), 0.02)},
    lambda r: {"zero_variance_groups": noisy(0.65, 0.02), "reward": noisy(ramp(0.3, 0.34, 0.0), 0.09)},
    lambda r: {
        "zero_variance_groups": noisy(ramp(0.25, 0.65, 0.3), 0.03),
        "reward": noisy(0.3 + 0.2 * X, 0.09),
    },
    lambda r: {"length": 300 * np.exp(CORRELATED[0]), "reward": 0.4 + 0.3 * X + 0.5 * CORRELATED[1]},
    lambda r: {"reward": noisy(0.3, 0.05), "eval_reward": noisy(ramp(0.2, 0.5, 0.0), 0.03)},
    lambda r: {"entropy": noisy(np.exp(-2.3 * X), 0.005)},
    lambda r: {
        "approx_kl": noisy(-0.002 - 0.02 * AFTER, 0.0005),
        "reward": noisy(0.3 + 0.3 * X - 0.1 * AFTER, 0.02),
        "eval_reward": noisy(ramp(0.2, 0.5, 0.0), 0.03),
    },
    lambda r: {
        "eval_reward": None,
        "zero_variance_groups": None,
        "reward": noisy(np.full(STEPS, 0.88), 0.01),
    },
    lambda r: {"reward": np.where((X > 0.7) & (X < 0.85), 0.1, noisy(0.7, 0.02))},
    lambda r: {"reward": noisy(0.3 + 0.5 * X - 0.4 * AFTER, 0.02), "eval_reward": noisy(0.2 + 0.4 * X, 0.02)},
    lambda r: {"reward": noisy(0.7 - 0.4 * X, 0.02), "eval_reward": noisy(0.2 + 0.4 * X, 0.02)},
    lambda r: {"length": noisy(300 + 150 * X, 9), "reward": noisy(0.3, 0.05)},
    lambda r: {"no_eos": noisy(0.02 + 0.045 * X, 0.003), "length": noisy(600 + 2600 * X, 20)},
    lambda r: {"grad_norm": np.exp(noisy(-1, 0.1)) * np.where(np.arange(STEPS) % 60 == 31, 11, 1)},
    lambda r: {"eval_reward": None, "reward": np.minimum(noisy(ramp(20, 900, 0.0), 5), 200.0)},
]


@pytest.mark.parametrize("change", PROGRESS)
def test_progress_is_no_failure(tmp_path, change):
    alarms = judged(tmp_path / "run", healthy() | change(healthy())).alarms
    progress = {"D01", "D02", "D04", "D05", "D15", "D17", "D20", "D21", "D22", "D42"}
    assert not progress & {alarm.id for alarm in alarms}


FALLS = [
    *((1e-5 * X, 0.0, 0, ["D06"]), (0.2 * X, 0.0, 0, []), (0.3 * X, 0.5, 3, []), (0.3 * X, 0.5, 8, [])),
    (0.4 - 0.4 * np.exp(-100 * X), 0.1, 3, []),  # within five steps
]


@pytest.mark.parametrize(("change", "scatter", "seed", "expected"), FALLS)
def test_a_loss_that_falls_by_next_to_nothing_does_not_fall(tmp_path, change, scatter, seed, expected):
    loss = (0.6931 - change) * np.exp(noisy(0.0, scatter, seed))
    found = judged(tmp_path, {"loss": loss}, {"loss": "loss"}).alarms
    assert [alarm.id for alarm in found] == expected


@pytest.mark.parametrize(("gain", "scatter", "expected"), [(0.06, 0.08, False), (0.0, 0.08, True)])
def test_a_short_run_that_may_still_rise_is_not_accused(tmp_path, gain, scatter, expected):
    """The rise is within the scatter: 25 steps cannot exclude it, nor show it."""
    reward = 0.3 + gain * np.linspace(0, 1, 25) + scatter * np.random.default_rng(4).standard_normal(25)
    found = judged(tmp_path, {"reward": reward}, {"reward": OURS["reward"]}).alarms
    assert ("D01" in {alarm.id for alarm in found}) == expected


def test_a_policy_that_left_its_reference_at_once_is_named(tmp_path):
    """Within the first window the KL is 5 nats: it has no trend after that."""
    columns = healthy() | {
        "reference_kl": np.where(np.arange(STEPS) < 2, 1e-3, noisy(5.0, 0.2)),
        "reward": noisy(0.3, 0.03),
    }
    alarms = {alarm.id: alarm for alarm in judged(tmp_path / "flat", columns).alarms}
    assert alarms["D29"].severity == "error"
    rising = columns | {"reward": noisy(ramp(0.2, 0.8, 0.0), 0.03)}
    assert "D29" not in {alarm.id for alarm in judged(tmp_path / "rising", rising).alarms}


def test_a_kl_that_breaks_is_told_with_the_rewards_around_its_jump(tmp_path):
    """The KL goes on growing after its jump: the onset is still the jump."""
    steps = np.arange(60)
    growing = np.where(steps < 41, 0.001 * steps + 0.002, 0.5 * (steps - 40))
    growing *= 1 + np.random.default_rng(7).normal(0, 0.1, 60)
    columns = {"reference_kl": growing, "reward": np.where(steps < 41, 0.757, 0.059)}
    alarms = {alarm.id: alarm for alarm in judged(tmp_path, columns).alarms}
    assert alarms["D29"].onset == 41
    assert alarms["D29"].found.endswith("; the median reward is 0.757 before step 41, 0.059 from there on")
    assert not any("RECORD" in alarm.experiment for alarm in alarms.values())


@pytest.mark.parametrize("spikes", [2, 3])
def test_two_spikes_of_a_short_run_are_no_finding(tmp_path, spikes):
    run = healthy(steps=50)
    run["grad_norm"] **= 2  # heavy tails
    run["grad_norm"][[12, 30, 44][:spikes]] *= 60
    alarms = examine(read_run(write_stats(tmp_path, run))).alarms
    assert [(alarm.id, alarm.onset) for alarm in alarms] == ([("D17", 12)] if spikes == 3 else [])


def test_equal_rewards_of_half_credit_are_neither_right_nor_wrong(tmp_path):
    names = NAMES | {"reward_max": "reward/max", "reward_min": "reward/min"}
    run = without(healthy(), "eval_reward") | {
        "reward": np.full(STEPS, 0.5),
        "reward_min": np.full(STEPS, 0.5),
        "reward_max": np.where(np.arange(STEPS) < 5, 1.0, 0.5),
        "zero_variance_groups": np.full(STEPS, 1.0),
    }
    run["reward_min"][:5] = 0.0
    [alarm] = [one for one in judged(tmp_path, run, names).alarms if one.id == "D22"]
    said = (alarm.severity, alarm.title, alarm.found.split("; ")[1])
    assert said == ("error", "most groups have equal rewards", "every reward is 0.5")
    run = healthy() | FAILURES["all right"][3](healthy())
    assert {one.id: one.severity for one in judged(tmp_path / "right", run).alarms}["D22"] == "warning"
    run = without(healthy(), "eval_reward") | {"reward": np.full(STEPS, 3.0)}
    found = {
        one.id: one
        for one in judged(tmp_path / "3", run | {"zero_variance_groups": np.full(STEPS, 1.0)}).alarms
    }
    assert "D02" not in found
    assert (found["D22"].found[-17:], found["D01"].title) == ("every reward is 3", "the reward does not rise")


def test_a_collapse_comes_before_the_reward_that_rose_and_fell_after_it(tmp_path):
    hump = np.where(np.arange(STEPS) < BEGIN, ramp(0.2, 0.6, 0.0), 0.1)
    collapsed = np.where(np.arange(STEPS) < BEGIN, 0.8, 0.02) + 0.001 * np.sin(np.arange(STEPS))
    run = without(healthy(), "eval_reward") | {"reward": noisy(hump, 0.01), "entropy": collapsed}
    alarms = judged(tmp_path, run).alarms
    assert alarms[0].id == "D15"
    assert not {"D16"} & {alarm.id for alarm in alarms}
    levels = {"entropy": np.clip(ramp(1.6, -2.4, 0.0), 0, 9), "reward": np.clip(ramp(0.1, 2.2, 0.0), 0, 0.7)}
    settled = without(healthy(), "eval_reward") | levels | {"reward": noisy(levels["reward"], 0.01)}
    alarms = judged(tmp_path / "settled", settled).alarms
    assert [alarm.id for alarm in alarms][:2] == ["D15", "D05"]


@pytest.mark.parametrize(("steps", "named"), [(2, []), (5, [90])])
def test_an_engine_that_disagrees_for_a_few_steps_in_a_row_is_named(tmp_path, steps, named):
    run = healthy()
    run["logprob_difference"][90 : 90 + steps] += 0.35
    found = judged(tmp_path, run).alarms
    assert [alarm.onset for alarm in found if alarm.id == "D24"] == named
