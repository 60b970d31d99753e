"""`areal-debug doctor`: no alarm on healthy runs, each problem with its evidence."""

import csv
import json
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from areal_debug.cli import main
from areal_debug.doctor.read import UnreadableRun, read_run
from areal_debug.doctor.series import Series, trend
from areal_debug.doctor.sources.locate import find_sources

from .runs import OURS, STEPS, TROUBLES, healthy, write_stats

LONG = pytest.mark.long
# Further alarms of a run whose reward does not rise, and of one that peaked.
CONSEQUENCES = defaultdict(tuple, D01=("D04", "D16"), D16=("D01",), D21=("D01", "D16"), D04=("D01", "D16"))
VERL = {
    "reward": "critic/rewards/mean",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "length": "response_length/mean",
    "no_eos": "response_length/clip_ratio",
    "clip_ratio": "actor/pg_clipfrac",
    "behave_imp_weight": "rollout_corr/rollout_is_mean",
}
TRL = {
    "reward": "reward",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "length": "completions/mean_length",
    "no_eos": "completions/clipped_ratio",
    "zero_variance_groups": "frac_reward_zero_std",
}

# as the trackers of slime 624b824a, SkyRL a9564572, prime-rl 559b4477 and NeMo-RL 7ea279ab get them
FRAMEWORKS = {
    "slime": {
        "reward": "rollout/raw_reward",
        "length": "rollout/response_len/mean",
        "no_eos": "rollout/truncated_ratio",
        "entropy": "train/entropy_loss",
        "clip_ratio": "train/pg_clipfrac",
        "approx_kl": "train/ppo_kl",
        "reference_kl": "train/kl_loss",
        "grad_norm": "train/grad_norm",
        "lr": "train/lr-pg_0",
        "logprob_difference": "train/train_rollout_logprob_abs_diff",
    },
    "SkyRL": {
        "reward": "reward/avg_raw_reward",
        "eval_reward": "eval/all/avg_score",
        "length": "generate/avg_num_tokens",
        "entropy": "policy/policy_entropy",
        "clip_ratio": "policy/loss_metrics/clip_ratio",
        "reference_kl": "policy/policy_kl",
        "staleness": "async/staleness_mean",
        "lr": "policy/policy_lr",
        "logprob_difference": "policy/rollout_train_logprobs_abs_diff_mean",
    },
    "prime-rl": {
        "reward": "train/agg/effective/agent/reward/mean",
        "length": "train/agg/effective/num_output_tokens/mean",
        "no_eos": "train/agg/effective/agent/is_truncated/mean",
        "entropy": "entropy/all/mean",
        "k3": "mismatch_kl/all/mean",
        "staleness": "off_policy/mean",
        "grad_norm": "optim/grad_norm",
        "lr": "optim/lr",
        "loss": "loss/mean",
    },
    "NeMo-RL": {
        "reward": "train/reward",
        "eval_reward": "validation/accuracy",
        "length": "train/mean_gen_tokens_per_sample",
        "no_eos": "train/truncation_rate",
        "entropy": "train/approx_entropy",
        "k3": "train/gen_kl_error",
        "importance_weight": "train/probs_ratio",
        "behave_imp_weight": "train/sampling_importance_ratio",
        "reference_kl": "train/kl_penalty",
        "grad_norm": "train/grad_norm",
        "lr": "train/lr",
        "loss": "train/loss",
    },
}


def examined(run, *options):
    done = CliRunner().invoke(main, ["doctor", str(run), "--json", *options])
    return done.exit_code, json.loads(done.stdout) if done.exit_code != 2 else done.stderr


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=LONG) for n in range(2, 20))])
def test_run_that_learns_gets_no_alarm(tmp_path, seed):
    code, found = examined(write_stats(tmp_path, healthy(seed)))
    assert (code, found["verdict"], found["alarms"]) == (0, "healthy", [])
    assert found["judged"]["reward"] == "ppo_actor/task_reward/avg"
    assert found["num_steps"] == STEPS


@pytest.mark.parametrize("name", TROUBLES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=LONG)])
def test_trouble_is_named_with_steps_advice_source_and_experiment(tmp_path, name, seed):
    expected, spoil = TROUBLES[name]
    code, found = examined(write_stats(tmp_path, spoil(healthy(seed))))
    alarms = {alarm["id"]: alarm for alarm in found["alarms"]}
    assert code == 1
    assert expected in alarms, sorted(alarms)
    assert set(alarms) <= {expected, *CONSEQUENCES[expected]}, sorted(alarms)
    alarm = alarms[expected]
    assert len(alarm["evidence"]) > 0
    assert all(0 <= step < STEPS for step, _ in alarm["evidence"])
    assert all(alarm[part] for part in ("found", "advice", "experiment", "source", "metric"))


def test_noise_that_is_larger_than_the_gain_is_no_fall_from_a_peak(tmp_path):
    noisy = healthy() | {"reward": 0.5 + 0.3 * np.random.default_rng(3).normal(size=STEPS)}
    _, found = examined(write_stats(tmp_path, noisy))
    assert "D04" not in [alarm["id"] for alarm in found["alarms"]]


def test_of_a_handful_of_steps_only_what_holds_in_each_is_judged(tmp_path):
    few = {name: values[:7] for name, values in TROUBLES["truncation"][1](healthy()).items()}
    few["no_eos"] = np.array([0.9] * 6 + [0.1])
    code, _ = examined(write_stats(tmp_path, few))
    assert code == 2
    done = CliRunner().invoke(main, ["doctor", str(tmp_path)])
    assert done.stdout.startswith("Inconclusive: 7 steps of ")
    few["no_eos"] = np.full(7, 0.9)
    code, found = examined(write_stats(tmp_path, few))
    assert (code, [(a["id"], a["severity"]) for a in found["alarms"]]) == (1, [("D20", "warning")])
    longer = write_stats(tmp_path, {name: np.full(8, values[0]) for name, values in few.items()})
    assert "D20" in [alarm["id"] for alarm in examined(longer)[1]["alarms"]]


@pytest.mark.parametrize(
    ("line", "id"),
    [
        (
            "'loss': -0.0, 'grad_norm': 0.0, 'learning_rate': 2.6e-07, 'reward': 0.34, 'reward_std': 0.44",
            "D13",
        ),
        ("{'loss': 0.1, 'grad_norm': 0.3, 'learning_rate': 0.0, 'reward': 0.34, 'reward_std': 0.44}", "D13"),
        ("{'loss': 0.0, 'grad_norm': 0.0, 'reward': 0.0, 'frac_reward_zero_std': 1.0}", "D22"),
        ("{'loss': 0.0, 'grad_norm': 0.2, 'reward': 0.4, 'completions/clipped_ratio': 0.9}", "D20"),
        ("{'loss': 0.0, 'grad_norm': 0.2, 'reward': 0.4, 'frac_reward_zero_std': 0.7}", None),
    ],
)
def test_three_lines_that_somebody_posted_show_what_holds_in_each(tmp_path, line, id):
    (tmp_path / "post.txt").write_text(f"is this normal?\n{line}\n{line}\n{line}\n")
    done = CliRunner().invoke(main, ["doctor", str(tmp_path / "post.txt"), "--json"])
    alarms = [alarm["id"] for alarm in json.loads(done.stdout)["alarms"]]
    assert (done.exit_code, alarms) == ((1, [id]) if id else (2, []))


def test_a_gradient_norm_that_grows_without_end_is_named(tmp_path):
    run = {"grad_norm": 10.0 ** np.arange(12), "reward": np.full(12, 0.5)}
    code, found = examined(write_stats(tmp_path, run))
    assert (code, found["alarms"][0]["title"]) == (1, "gradients that grow without end")


def test_one_bad_step_is_no_alarm(tmp_path):
    run = healthy()
    run["no_eos"][150] = 0.9
    run["grad_norm"][80] *= 50
    assert examined(write_stats(tmp_path, run))[0] == 0


@pytest.mark.parametrize(("norms", "first"), [([np.nan] * 12, 0), ([0.0, 0.0, np.inf], 2)])
def test_gradients_that_are_not_finite_are_named_in_any_run(tmp_path, norms, first):
    write_stats(tmp_path, {"grad_norm": np.array(norms)})
    code, report = examined(tmp_path)
    alarm = next(alarm for alarm in report["alarms"] if alarm["id"] == "D17")
    count = int(np.sum(~np.isfinite(norms)))
    assert code == 1
    assert alarm["found"] == f"{count} of {len(norms)} steps are not finite"
    assert alarm["advice"][0].endswith(f"break step {first}: areal-debug replay RECORD --explain {first}")
    done = CliRunner().invoke(main, ["doctor", str(tmp_path)])
    assert done.stdout.startswith("Gradients that are not finite: ")


def test_metrics_of_verl_in_jsonl_and_of_trl_in_trainer_state_are_judged(tmp_path):
    broken = TROUBLES["truncation"][1](healthy())
    write_stats(tmp_path / "verl", {name: broken[name] for name in VERL}, VERL)
    (tmp_path / "verl" / "stats.jsonl").rename(tmp_path / "verl" / "metrics.jsonl")
    code, found = examined(tmp_path / "verl")
    assert (code, found["names_of"], [alarm["id"] for alarm in found["alarms"]]) == (1, "verl", ["D20"])
    history = [
        {"step": step + 1, "epoch": 0.1} | {f"train/{TRL[name]}": float(broken[name][step]) for name in TRL}
        for step in range(STEPS)
    ]
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    code, found = examined(tmp_path / "trl")
    assert (code, found["names_of"], [alarm["id"] for alarm in found["alarms"]]) == (1, "TRL", ["D20"])


def test_tensorboard_events_and_an_exported_table_are_judged_alike(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    broken = TROUBLES["entropy collapse"][1](healthy())
    with SummaryWriter(str(tmp_path / "events")) as writer:
        for step in range(STEPS):
            writer.add_scalar(OURS["entropy"], broken["entropy"][step], step)
    with (tmp_path / "export.csv").open("w", newline="") as out:
        table = csv.writer(out)
        table.writerow(["Step", f"my-run - {OURS['entropy']}"])
        table.writerows([step, broken["entropy"][step]] for step in range(STEPS))
    for source in (tmp_path / "events", tmp_path / "export.csv"):
        code, found = examined(source)
        assert (code, [alarm["id"] for alarm in found["alarms"]]) == (1, ["D15"])


def test_recommended_change_is_overrides_that_the_config_takes(tmp_path):
    from areal_core.config import GRPOConfig, load_expr_config

    run = write_stats(tmp_path, TROUBLES["behaviour weight"][1](healthy()))
    done = CliRunner().invoke(main, ["doctor", str(run), "--json"])
    lines = [f"{name}={json.dumps(value)}" for name, value in json.loads(done.stdout)["overrides"].items()]
    assert done.exit_code == 1
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
    assert examined(folder)[0] == 0
    (folder / "config.json").write_text(json.dumps({"actor": {"ppo_n_minibatches": 1}}))
    code, found = examined(folder)
    assert (code, found["alarms"][0]["id"], found["alarms"][0]["severity"]) == (1, "D10", "error")


def test_report_in_the_terminal_puts_the_gravest_alarm_first(tmp_path):
    run = TROUBLES["filtering"][1](TROUBLES["clipping"][1](healthy()))
    done = CliRunner().invoke(main, ["doctor", str(write_stats(tmp_path, run))])
    assert done.stdout.startswith("More than half of the tokens are clipped, and 1 more: 200 steps of ")
    assert done.stdout.index("D12") < done.stdout.index("D26")
    assert "Try first" in done.stdout


def test_page_contains_the_alarm_and_a_chart_of_every_metric(tmp_path):
    run = write_stats(tmp_path, TROUBLES["stale engine"][1](healthy()))
    page = tmp_path / "doctor.html"
    assert CliRunner().invoke(main, ["doctor", str(run), "-o", str(page)]).exit_code == 1
    text = page.read_text()
    assert "Engine and trainer drift apart" in text
    assert text.count("<svg") == len(OURS) + 1
    assert "src=" not in text


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: folder / "nowhere", "does not exist: give the folder or the metrics file of a run"),
        (lambda folder: folder, "contains no metrics: searched for stats.jsonl"),
        (lambda folder: written(folder / "stats.jsonl", "{}\n{}\n"), "contains no numbers by step"),
        (lambda folder: written(folder / "stats.jsonl", "{oops\n{}\n"), "line 1 is not JSON"),
        (lambda folder: written(folder / "run.bin", ""), "has no known format"),
        (
            lambda folder: written(folder / "trainer_state.json", '{"log_history": 5}'),
            "has no list log_history",
        ),
        (
            lambda folder: written(folder / "a.jsonl", '[1]\n{"step": "abc", "loss": 1}'),
            "contains no numbers by step",
        ),
    ],
)
def test_what_cannot_be_judged_is_one_sentence(tmp_path, make, sentence):
    code, output = examined(make(tmp_path))
    assert (code, sentence in output) == (2, True), output


def written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_last_line_that_a_killed_run_did_not_finish_is_passed_over(tmp_path):
    file = write_stats(tmp_path, healthy()) / "stats.jsonl"
    file.write_text(file.read_text() + '{"step": 200, "ppo_ac')
    assert examined(tmp_path)[0] == 0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_framework_is_known_by_its_own_names(tmp_path, framework):
    names = FRAMEWORKS[framework]
    metrics = {quantity: np.linspace(0.1, 0.2, 10) for quantity in names}
    run = read_run(write_stats(tmp_path, metrics, names))
    assert run.family == framework
    judged = {quantity: series.name for quantity, series in run.series.items()}
    assert judged == {quantity: name.removeprefix("train/") for quantity, name in names.items()}


def test_several_runs_in_a_folder_are_listed_and_one_is_chosen_by_name(tmp_path):
    for age_s, name in enumerate(("newest", "middle", "oldest")):
        spoil = TROUBLES["truncation"][1] if name == "newest" else lambda run: run
        file = write_stats(tmp_path / name, spoil(healthy())) / "stats.jsonl"
        os.utime(file, (1_000_000 - age_s, 1_000_000 - age_s))
    code, sentence = examined(tmp_path)
    assert code == 2
    assert (
        sentence.split()
        == (
            f"Error: 3 runs found in {tmp_path}, the last written first: newest/stats.jsonl, middle/stats.jsonl,"
            " oldest/stats.jsonl; choose one with --run, as in: --run newest/stats.jsonl"
        ).split()
    )
    code, found = examined(tmp_path, "--run", "newest")
    assert (code, found["source"]) == (1, str(tmp_path / "newest" / "stats.jsonl"))
    assert found["other_runs"] == ["middle/stats.jsonl", "oldest/stats.jsonl"]
    assert examined(tmp_path, "--run", "middle")[0] == 0
    code, sentence = examined(tmp_path, "--run", "stats.jsonl")
    assert (code, "--run stats.jsonl fits 3 of them; choose" in sentence) == (2, True)
    code, sentence = examined(tmp_path, "--run", "else")
    assert (code, "--run else fits none of them; choose" in sentence) == (2, True)


def test_a_run_is_named_by_its_folders_though_another_name_begins_so(tmp_path):
    for name in ("logs/train/a", "logs/train/a-replay"):
        write_stats(tmp_path / name, healthy())
    code, found = examined(tmp_path, "--run", "train/a")
    assert (code, found["source"]) == (0, str(tmp_path / "logs/train/a/stats.jsonl"))
    code, sentence = examined(tmp_path, "--run", "rain/a")
    assert (code, "--run rain/a fits 2 of them; choose" in sentence) == (2, True)


def test_metrics_files_of_one_run_are_not_counted_as_several_runs(tmp_path):
    for step in (1, 2):
        folder = tmp_path / "hf" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        history = [{"step": number, "reward": 1.0} for number in range(step + 1)]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert read_run(tmp_path / "hf").other_runs == ()
    (tmp_path / "tb").mkdir()
    for number in (1, 2):
        (tmp_path / "tb" / f"events.out.tfevents.{number}.host").touch()
    assert len(find_sources(tmp_path / "tb")) == 1
    (tmp_path / "tb" / "another").mkdir()
    file = tmp_path / "tb" / "another" / "events.out.tfevents.3.host"
    file.touch()
    os.utime(file, (1_000_000, 1_000_000))
    assert [source.name for source in find_sources(tmp_path / "tb")] == ["tb", "another"]


def test_trend_is_the_slope_that_one_can_see_and_outliers_do_not_bend_it():
    x = np.arange(100)
    values = 0.02 * x + 0.1 * np.random.default_rng(0).normal(size=100)
    values[::10] += 50
    found = trend(Series("x", x, values))
    assert found.change == pytest.approx(0.02 * 99, rel=0.1)
    assert found.low < found.change < found.high
    assert found.rises
    assert trend(Series("x", x[:7], values[:7])) is None


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("stats.jsonl", "[" * 100_000 + "\n{}\n", "stats.jsonl, line 1 is not JSON: maximum recursion depth"),
        ("trainer_state.json", "{", "trainer_state.json is not JSON: Expecting property name"),
        ("stats.jsonl", "\udcff\n", "stats.jsonl is not text: 'utf-8' codec"),
        (
            "wandb.csv",
            f"Step,a\n1,{'x' * 200_000}\n",
            "wandb.csv, after line 1: not a row of a table: field larger",
        ),
        ("stats.jsonl", '{"step": 1000000000000000000000, "a": 1}\n', "contains no numbers by step"),
    ],
)
def test_a_damaged_metrics_file_is_one_sentence(name, text, sentence, tmp_path):
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(UnreadableRun) as refused:
        read_run(tmp_path)
    assert sentence in str(refused.value)


def test_a_row_wider_than_its_table_and_a_number_beyond_a_float_lose_that_cell_only(tmp_path):
    (tmp_path / "wandb.csv").write_text("Step,a\n1,2,3,4\n2,3\n")
    assert read_run(tmp_path).by_name["a"].values.tolist() == [2.0, 3.0]
    (tmp_path / "stats.jsonl").write_text(f'{{"step": 1, "a": 5, "b": {10**400}}}\n')
    assert {name: one.values.tolist() for name, one in read_run(tmp_path).by_name.items()} == {"a": [5.0]}
