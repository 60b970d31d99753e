"""Results on disk to a report: literal numbers, names, missing samples, comparisons."""

import json

import pytest

from areal_debug.eval.results import make_report, read_models, read_settings
from tests.evaluation.conftest import printed, write_evaluation


def write_results(folder, rewards_of_models: dict[str, list[list[float]]], n_samples: int = 4, **summary):
    lines = {
        path: [
            {"prompt_id": prompt, "sample_id": i, "reward": reward, "num_sampled": 10,
             "finish_reason": "length" if i == 0 else "stop", "prompt": f"{prompt + 1} + 1", "completion": "!"}
            for prompt, of_prompt in enumerate(rewards)
            for i, reward in enumerate(of_prompt)
        ]
        for path, rewards in rewards_of_models.items()
    }  # fmt: skip
    sampling = {"greedy": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 64}
    return write_evaluation(folder, lines, num_rows=3, n_samples=n_samples, sampling=sampling, **summary)


def report_of(folder, *, ks=(1, 4), solved_above=0.0):
    settings = read_settings(folder)
    samples = read_models(folder, settings, ks, solved_above)
    return make_report("e/t", settings, samples, solved_above=solved_above)


def test_a_model_has_its_mean_reward_pass_at_k_and_lengths(tmp_path):
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    report = report_of(write_results(tmp_path, {"m/model": rewards}), ks=(1, 2, 4))
    [model] = report.models
    assert (model.name, model.num_rows) == ("model", 3)
    reward = model.measures["mean reward"]
    assert reward.value == pytest.approx(1 / 3)
    assert reward.low < 1 / 3 < reward.high
    assert model.measures["pass@1"].value == pytest.approx(1 / 3)
    assert model.measures["pass@2"].value == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert model.measures["pass@4"].value == pytest.approx(2 / 3)
    assert model.facts == {
        "num_samples": 12,
        "missing": 0,
        "repeated": 0,
        "truncated": 0.25,
        "mean_tokens": 10.0,
    }
    assert report.comparisons == ()
    assert report.distinct_rewards == (0.0, 1.0)


def test_missing_samples_are_counted_and_leave_their_prompt_out_of_pass_at_k(tmp_path):
    folder = write_results(tmp_path, {"m": [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]})
    [model] = report_of(folder).models
    assert (model.num_rows, model.facts["missing"]) == (2, 5)  # a sample, and a whole prompt
    assert model.measures["pass@1"].value == 0.5
    assert model.measures["pass@4"].value == 1.0  # of the first prompt alone


def test_models_are_compared_on_the_prompts_that_both_answered(tmp_path):
    first = [[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    second = [[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    report = report_of(write_results(tmp_path, {"a/model": first, "b/model": second}))
    assert [model.name for model in report.models] == ["a/model", "b/model"]
    [comparison] = report.comparisons
    assert (comparison.num_rows, comparison.better, comparison.worse, comparison.equal) == (2, 1, 1, 0)
    assert comparison.measures["mean reward"].value == pytest.approx(0.125)
    assert comparison.measures["pass@4"].value == pytest.approx(0.0)
    assert comparison.p_value == 1.0
    assert comparison.verdict == "no difference found"


def test_a_difference_on_every_prompt_has_a_verdict(tmp_path):
    low, high = [[0.0] * 4] * 8, [[1.0, 1.0, 0.0, 0.0]] * 8
    report = report_of(write_results(tmp_path, {"base": low, "better": high, "same": low}))
    assert [item.verdict for item in report.comparisons] == ["better", "no difference found"]
    assert report.comparisons[0].p_value == pytest.approx(2 * 2 / 2**8)  # Holm: of two comparisons
    report = report_of(write_results(tmp_path, {"base": high, "worse": low}))
    assert report.comparisons[0].verdict == "worse"


def test_scores_of_a_reward_model_have_means_differences_and_a_verdict(tmp_path, capsys):
    rewards = [[0.0, 0.0]] * 8
    models = {"base": rewards, "new": rewards}
    folder = write_results(tmp_path, models, n_samples=2, reward_model="rm")
    for number in (0, 1):
        file = folder / f"samples-{number}.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        scored = [line | {"score": line["prompt_id"] + number / 2} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in scored))
    report = report_of(folder, ks=(1,))
    assert [model.measures["mean score"].value for model in report.models] == [3.5, 4.0]
    [item] = report.comparisons
    assert (item.verdict, item.by_score.verdict) == ("no difference found", "better")
    assert item.measures["mean score"].value == 0.5
    assert item.by_score.p_value == pytest.approx(2 / 2**8)
    out = printed(report, capsys)
    assert "Against base: new: no difference found, by score better" in out
    assert "scores are of rm; the rewards do not contain them" in out


def test_prompts_with_the_same_text_are_counted_and_named(tmp_path, capsys):
    folder = write_results(tmp_path, {"m": [[1.0, 0.0]] * 3}, n_samples=2)
    file = folder / "samples-0.jsonl"
    file.write_text(file.read_text().replace("3 + 1", "1 + 1"))
    report = report_of(folder, ks=(1,))
    assert report.models[0].facts["repeated"] == 1
    assert "prompts of m with the text of an earlier one: 1." in printed(report, capsys)
