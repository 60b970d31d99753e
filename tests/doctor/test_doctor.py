"""`areal-debug doctor`: no alarm on healthy runs, each problem with its evidence; its medians."""

import json
import tomllib
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from areal_debug.doctor.read import UnreadableRun, read_run
from areal_debug.doctor.series import Series, medians_between, running_medians
from areal_debug.doctor.sources.to_series import collect

from .runs import STEPS, TROUBLES, diagnosed, healthy, said, troubled, write_stats

LONG = pytest.mark.long
# Further alarms of a run whose reward does not rise, and of one that peaked.
CONSEQUENCES = defaultdict(
    tuple, D01=("D16",), D16=("D01",), D21=("D01", "D16"), D04=("D01", "D16"), D55=("D01", "D16")
)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=LONG) for n in range(2, 20))])
def test_run_that_learns_gets_no_alarm(tmp_path, seed):
    code, found = diagnosed(write_stats(tmp_path, healthy(seed)))
    assert (code, found["verdict"], found["alarms"]) == (0, "healthy", [])
    assert found["judged"]["reward"] == "ppo_actor/task_reward/avg"
    assert found["num_steps"] == STEPS


@pytest.mark.parametrize("name", TROUBLES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=LONG)])
def test_trouble_is_named_with_steps_advice_source_and_experiment(tmp_path, name, seed):
    expected, run = troubled(name, seed)
    code, found = diagnosed(write_stats(tmp_path, run))
    alarms = {alarm["id"]: alarm for alarm in found["alarms"]}
    assert code == 1
    assert expected in alarms, sorted(alarms)
    assert set(alarms) <= {expected, *CONSEQUENCES[expected]}, sorted(alarms)
    alarm = alarms[expected]
    assert len(alarm["evidence"]) > 0
    assert all(0 <= step < STEPS for step, _ in alarm["evidence"])
    assert all(alarm[part] for part in ("found", "advice", "experiment", "source", "metric"))


def test_of_a_handful_of_steps_only_what_holds_in_each_is_judged(tmp_path):
    few = {name: one[:7] for name, one in healthy().items()} | {"no_eos": np.array([0.9] * 6 + [0.1])}
    assert diagnosed(write_stats(tmp_path, few))[0] == 2
    assert said(tmp_path).startswith("Inconclusive: 7 steps of ")


POSTS = tomllib.loads(Path(__file__).with_name("posts.toml").read_text(encoding="utf-8"))["posts"]


@pytest.mark.parametrize("post", POSTS, ids=lambda post: str(post["line"]))
def test_lines_that_somebody_posted_show_what_holds_in_each_and_one_shows_no_trend(tmp_path, post):
    count, line, id = post["count"], post["line"], post["id"]
    post = tmp_path / "post.txt"
    lines = (
        [line] * count if isinstance(line, str) else [f"{{'loss': {loss}, 'epoch': 0.1}}" for loss in line]
    )
    post.write_text("is this normal?\n" + "\n".join(lines))
    code, found = diagnosed(post)
    assert ([one["id"] for one in found["alarms"]], code == 1) == ([id] * bool(id), bool(id) and count > 1)
    assert ("; one step shows no trend: give more" in said(post)) == (count == 1 and bool(id))


GROWS = 0.5 * 1.18 ** np.maximum(0, np.arange(57) - 29)  # from step 30 on


@pytest.mark.parametrize(
    ("norms", "since"),
    [(10.0 ** np.arange(12), 0), (GROWS, 30), (GROWS[29:], 0), (np.linspace(9, 40, 12), None)],
)
def test_a_gradient_norm_that_grows_is_named_from_its_first_step_on_and_is_no_spike(tmp_path, norms, since):
    norms = norms * np.exp(0.05 * np.random.default_rng(0).normal(size=len(norms)))
    _, found = diagnosed(write_stats(tmp_path, {"grad_norm": norms, "reward": np.full(len(norms), 0.5)}))
    alarms = [(one["title"], one["onset"]) for one in found["alarms"] if one["id"] == "D17"]
    assert alarms == ([] if since is None else [("gradients grow without end", since)])


@pytest.mark.parametrize(("norms", "first"), [([np.nan] * 12, 0), ([0.0, 0.0, np.inf], 2)])
def test_gradients_that_are_not_finite_are_named_in_any_run(tmp_path, norms, first):
    write_stats(tmp_path, {"grad_norm": np.array(norms)})
    code, report = diagnosed(tmp_path)
    alarm = next(alarm for alarm in report["alarms"] if alarm["id"] == "D17")
    count = int(np.sum(~np.isfinite(norms)))
    assert code == 1
    assert alarm["found"] == f"the norm is not finite in {count} of {len(norms)} steps"
    assert alarm["advice"][0] == f"find the samples that break step {first}"  # no record was read
    texts = (*alarm["advice"], alarm["experiment"])
    assert not any(word in text for text in texts for word in ("RECORD", "--explain"))
    assert said(tmp_path).startswith("Gradients are not finite: ")
    assert ("last inf" in said(tmp_path)) == (first == 2)


@pytest.mark.parametrize(("rate", "leads"), [(1e30, True), (5.0, True), (1.0, False), (1e-6, False)])
def test_a_learning_rate_that_no_weights_survive_leads(tmp_path, rate, leads):
    columns = {"lr": [rate] * 12, "grad_norm": [np.nan] * 12, "zero_variance_groups": [1.0] * 12}
    write_stats(tmp_path, {name: np.array(values) for name, values in columns.items()})
    _, found = diagnosed(tmp_path)
    first = found["alarms"][0]
    assert (first["id"], first["severity"]) == ("D48" if leads else "D17", "error")
    assert first["advice"][0].startswith("lower ") == leads


def test_the_trainer_state_of_transformers_is_judged(tmp_path):
    names = {"reward": "reward", "no_eos": "completions/clipped_ratio", "lr": "learning_rate"}
    _, broken = troubled("truncation")
    write_stats(tmp_path, {name: broken[name] for name in names}, names)
    rows = [json.loads(line) for line in (tmp_path / "stats.jsonl").read_text().splitlines()]
    (tmp_path / "stats.jsonl").unlink()
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    code, found = diagnosed(tmp_path)
    assert (code, found["names_of"], [alarm["id"] for alarm in found["alarms"]]) == (1, "TRL", ["D20"])


def test_recommended_change_is_overrides_that_the_config_takes(tmp_path):
    from areal_core.config import GRPOConfig, load_expr_config

    run = write_stats(tmp_path, troubled("behaviour weight")[1])
    code, found = diagnosed(run)
    lines = [f"{name}={json.dumps(value)}" for name, value in found["overrides"].items()]
    assert code == 1
    assert lines == [
        "rollout.max_head_offpolicyness=0",
        "actor.recompute_logprob=false",
        "actor.use_decoupled_loss=false",
    ]
    config = Path(__file__).parents[2] / "examples" / "gsm8k_grpo.yaml"
    loaded, _ = load_expr_config(["--config", str(config), *lines], GRPOConfig)
    assert loaded.rollout.max_head_offpolicyness == 0


def test_one_minibatch_must_have_weights_of_exactly_1(tmp_path):
    run = healthy() | {"importance_weight": np.full(STEPS, 1.01)}
    folder = write_stats(tmp_path, run)
    assert diagnosed(folder)[0] == 0
    (folder / "config.json").write_text(json.dumps({"actor": {"ppo_n_minibatches": 1}}))
    code, found = diagnosed(folder)
    assert (code, found["alarms"][0]["id"], found["alarms"][0]["severity"]) == (1, "D10", "error")


def test_trend_is_the_slope_that_one_can_see_and_outliers_do_not_bend_it():
    x = np.arange(100)
    values = 0.02 * x + 0.1 * np.random.default_rng(0).normal(size=100)
    values[::10] += 50
    found = Series("x", x, values).trend
    assert found.change == pytest.approx(0.02 * 99, rel=0.1)
    assert found.low < found.change < found.high
    assert found.rises
    assert Series("x", x[:7], values[:7]).trend is None


def test_a_row_wider_than_its_table_and_a_number_beyond_a_float_lose_that_cell_only(tmp_path):
    (tmp_path / "wandb.csv").write_text("Step,a\n1,2,3,4\n2,3\n")
    assert read_run(tmp_path).by_name["a"].values.tolist() == [2.0, 3.0]
    (tmp_path / "wandb.csv").write_text(f"Step,a\n1,{'x' * 200_000}\n")
    with pytest.raises(UnreadableRun, match=r"wandb.csv, after line 1: not a row of a table: field larger"):
        read_run(tmp_path / "wandb.csv")
    (tmp_path / "stats.jsonl").write_text(f'{{"step": 1, "a": 5, "b": {10**400}}}\n')
    assert {name: one.values.tolist() for name, one in read_run(tmp_path).by_name.items()} == {"a": [5.0]}


@pytest.mark.parametrize(("count", "width"), [(1, 1), (2, 2), (9, 4), (64, 31), (100, 100), (257, 10)])
def test_running_medians_are_those_of_numpy(count, width):
    generator = np.random.default_rng(count)
    for values in (generator.normal(size=count), generator.integers(0, 3, count).astype(float)):
        windows = np.lib.stride_tricks.sliding_window_view(values, width)
        assert running_medians(values, width).tolist() == np.median(windows, axis=1).tolist()
        ends = np.sort(generator.integers(0, count + 1, (2, 50)), axis=0)
        expected = [np.median(values[a:b]) if a < b else np.nan for a, b in ends.T]
        np.testing.assert_array_equal(medians_between(values, *ends), expected)


def test_the_last_value_of_a_step_counts_in_any_order():
    rows = [{"step": step, "x": value} for step, value in ((3, 1.0), (1, 2.0), (3, 4.0), (2, float("nan")))]
    found = collect(rows)["x"]
    assert isinstance(found, Series)
    assert (found.steps.tolist(), found.values[[0, 2]].tolist()) == ([1, 2, 3], [2.0, 4.0])
