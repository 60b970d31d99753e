"""Terms that do nothing, counters and references that go back, end reasons, copies, masks, groups."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from areal_core.testing import make_tiny_tokenizer
from areal_debug import Recorder
from areal_debug.doctor.samples.read import read_rows
from areal_debug.doctor.samples.sample_rules import examine_samples
from recorder import open_record
from recorder.reader import Damage
from recorder.testing import gatherers

from .runs import diagnosed, write_stats

STEPS, FEW, END = 20, 8, 9


def doctor(path):
    _, found = diagnosed(path)
    return {alarm["id"]: alarm for alarm in found["alarms"]}, found["checks"]


def write(folder, config=None, metrics=None, change=None, model=None, steps=STEPS, is_logged=True):
    """Write a run whose rows `change` may spoil: it gets a row and its number in the step."""
    rng = np.random.default_rng(1)
    with Recorder(folder, trainer="slime", config=config or {}, model=model) as recorder:
        for step in range(steps):
            rows = []
            for number in range(16):
                size = int(rng.integers(6, 12))
                tokens = [*rng.integers(20, 90, size - 1).tolist(), END]
                row = {"prompt_tokens": [1, 100 + number // 4, 2], "completion_tokens": tokens}
                row |= {"reward": float(rng.random() < 0.3 + step / 40), "finish_reason": "stop"}
                row |= {"logprobs": (-rng.exponential(1.5, size)).tolist(), "versions": step}
                row["group"] = number // 4
                if change is not None:
                    change(row, number, rows)
                rows.append(row)
            stats = {name: value(step) for name, value in (metrics or {}).items()}
            stats = {"train/grad_norm": 0.5 + 0.1 * rng.random()} | stats
            recorder.step(step, rows, stats=stats if is_logged else None)
    return folder


def log(folder, metrics, config=None):
    """Write the metrics of a run alone, beside its options."""
    norm = {"train/grad_norm": lambda step: 0.5 + 0.01 * (7 * step % 10)}
    columns = {name: np.array([of(s) for s in range(STEPS)], float) for name, of in (norm | metrics).items()}
    write_stats(folder, columns, {name: name for name in columns})
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


@pytest.mark.parametrize(
    ("config", "value", "is_accused"),
    [
        ({"use_kl_loss": True, "kl_loss_coef": 0.05}, lambda s: 0.0, True),
        ({"use_kl_loss": False, "kl_loss_coef": 0.05}, lambda s: 0.0, False),
        ({"use_kl_loss": True, "kl_loss_coef": 0.0}, lambda s: 0.0, False),
        ({"use_kl_loss": True, "kl_loss_coef": 0.05}, lambda s: 1e-3 * s, False),
    ],
)
def test_a_weighted_term_that_is_always_0_is_named(tmp_path, config, value, is_accused):
    found, _ = doctor(log(tmp_path, {"train/kl_loss": value}, config))
    assert ("D32" in found) == is_accused
    assert not is_accused or "kl_loss_coef is 0.05" in found["D32"]["found"]


@pytest.mark.parametrize(
    ("name", "value", "id", "onset"),
    [
        ("rollout/version", lambda s: s if s < 12 else s - 12, "D46", 12),
        ("rollout/version", lambda s: s, "D46", None),
        ("train/kl_loss", lambda s: 0.02 * (1 + s) if s < 12 else 1e-4 * (s - 11), "D47", 12),
        ("train/lr", lambda s: 1e-6 * (1 + math.cos(math.pi * s / 10)), "D49", 10),
        ("train/lr", lambda s: 1e-6 * (1 + math.cos(math.pi * s / 20)), "D49", None),
        ("train/lr", lambda s: 1e-6 * (10 - s % 10), "D49", None),  # a restart
        ("train/kl_loss", lambda s: 0.02 * (1 + s) if s != 12 else 0.0, "D47", None),  # one value alone
    ],
)
def test_counters_and_references_that_go_back_have_their_step(tmp_path, name, value, id, onset):
    found, _ = doctor(log(tmp_path, {name: value}))
    assert (found[id]["onset"] if id in found else None) == onset


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    make_tiny_tokenizer().save_pretrained(folder)
    config = {"model_type": "llama", "eos_token_id": END, "bos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def cut_off(row, number, rows):
    if number % 3 == 1:
        for name in ("completion_tokens", "logprobs"):
            row[name] = row[name][:-2]


def stop_string(row, number, rows):
    if number % 3 == 1:
        row["completion_tokens"][-1] = 33


def another_end(row, number, rows):
    row["completion_tokens"][-1] = END if number % 2 else 95


@pytest.mark.parametrize(
    ("change", "is_accused"), [(None, False), (cut_off, True), (stop_string, False), (another_end, False)]
)
def test_stop_without_an_end_token_is_a_contradiction(tmp_path, model, change, is_accused):
    found, checks = doctor(write(tmp_path / "r", change=change, model=model, steps=FEW))
    assert ("S12" in found) == is_accused
    assert "S12" not in checks["unobserved"]


def test_without_a_model_the_end_tokens_are_unknown(tmp_path):
    assert doctor(write(tmp_path / "r", steps=FEW))[1]["unobserved"]["S12"] == ["end_tokens"]


def test_copies_in_a_group_are_named(tmp_path):
    def copy(row, number, rows):
        if number % 4 == 3:
            row |= {name: rows[-1][name] for name in ("completion_tokens", "logprobs")}

    assert "S13" in doctor(write(tmp_path / "copies", change=copy, steps=FEW))[0]
    assert "S13" not in doctor(write(tmp_path / "sound", steps=FEW))[0]

    def greedy(row, number, rows):
        copy(row, number, rows)
        row["logprobs"] = [-0.01] * len(row["logprobs"])

    assert "S13" not in doctor(write(tmp_path / "greedy", change=greedy, steps=FEW))[0]


@pytest.mark.parametrize("column", ["reward", "old_logprobs"])
def test_a_value_of_a_row_that_is_not_finite_is_named_with_its_place(tmp_path, column):
    def broken(row, number, rows):
        row["old_logprobs"] = [logp + 0.001 for logp in row["logprobs"]]
        if row["versions"] == 3 and number == 5:
            row["reward"], row["old_logprobs"][1] = (np.nan, -1.0) if column == "reward" else (1.0, -np.inf)

    metrics = {"train/loss": lambda step: 0.1}
    found, _ = doctor(write(tmp_path / "r", metrics=metrics, change=broken, steps=FEW))
    assert found["D18"]["title"] == "rewards or log-probs of rows are not finite"
    assert found["D18"]["onset"] == 3
    assert " --step 3 --at 13.1" in found["D18"]["look"]


def asked(row, number, rows, groups_of=4):
    """Give each group of each step a prompt of its own."""
    row["prompt_tokens"] = [3, 100 + row["versions"], 10 + number // groups_of, 2]


def without(at):
    def change(row, number, rows):
        asked(row, number, rows)
        row["loss_mask"] = [1] * len(row["completion_tokens"])
        row["loss_mask"][at] = 0

    return change


def alone_in_the_mask(row, number, rows):
    without(0)(row, number, rows)
    row["loss_mask"] = [0] * (len(row["completion_tokens"]) - 1) + [1]


def templated(row, number, rows):
    without(0)(row, number, rows)
    row["completion_tokens"][0] = 33


def appended(row, number, rows, mask=1):
    asked(row, number, rows)
    row["logprobs"][-1], row["loss_mask"] = 0.0, [1] * (len(row["completion_tokens"]) - 1) + [mask]


def of_tools(row, number, rows):
    asked(row, number, rows)
    row["loss_mask"] = [0] * len(row["completion_tokens"]) + [1, 1]
    row["completion_tokens"] += [30, 31]
    row["logprobs"] += [0.0, 0.0]


def split(row, number, rows):
    asked(row, number, rows)
    row["group"] = number


def alone(row, number, rows):
    asked(row, number, rows, groups_of=1)
    row["group"] = number


def doubled(row, number, rows):
    asked(row, number, rows)
    row["prompt_tokens"].insert(0, 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without(-1), {"S14": "the end token is never in the loss mask"}),
        (without(0), {"S14": "the first token of completions is never in the loss mask"}),
        (of_tools, {"S14": "no token with a log-prob of the engine is in the loss mask"}),
        (alone_in_the_mask, {"S14": "of completions the end token alone is in the loss mask"}),
        (appended, {"S14": "end tokens that were not sampled are in the loss mask"}),
        (split, {"S07": "samples of a prompt are not one group: each is a group of its own"}),
        (doubled, {"S15": "rows begin with two begin tokens"}),
        *((sound, {}) for sound in (asked, without(2), templated, alone, partial(appended, mask=0))),
    ],
)
def test_masks_groups_and_begin_tokens(tmp_path, model, change, says):
    found, _ = doctor(write(tmp_path / "r", change=change, model=model, steps=FEW))
    assert {id: found[id]["title"] for id in ("S07", "S14", "S15") if id in found} == says


@pytest.mark.parametrize(
    ("apart", "times", "says"),
    [
        (0, 1, "ranks train on the same rows"),
        (4, 2, "each row of the data comes again in its step"),
        (4, 1, ""),
    ],
)
def test_rows_of_data_that_come_again_are_named(tmp_path, apart, times, says):
    def record(rank, gather):
        with Recorder(tmp_path / "r", rank=rank, num_ranks=2, gather=gather) as recorder:
            for step in range(6):
                prompts = [[3, 100 + step, 10 + number + apart * rank, 2] for number in range(4)] * times
                rows = [{"prompt_tokens": p, "completion_tokens": [20, 30, END]} for p in prompts]
                recorder.step(step, rows)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(record, range(2), gatherers(2)))
    rows = read_rows(open_record(tmp_path / "r"), Damage())
    assert [one.alarm.title for one in examine_samples(rows)] == [says] * bool(says)


def computed(at):
    """Compute advantages of each row's group, `at` of a row's number in it; the same prompts in each step."""
    earlier = {}

    def change(row, number, rows):
        row["prompt_tokens"] = [1, 100 + number // 4 + 4 * (row["versions"] % 4), 2]
        row["completion_tokens"][0] = 20 + number % 4
        first = earlier.setdefault((*row["prompt_tokens"], row["completion_tokens"][0]), row["logprobs"][0])
        rewards = [0.0, 0.95, 0.95, 0.95] if number >= 8 else [0.0, 0.25, 1.0, 0.5]
        row["reward"] = rewards[number % 4]
        row["advantages"] = row["reward"] - sum(rewards) / 4
        row["old_logprobs"] = [value + 0.01 for value in row["logprobs"]]
        row["ref_logprobs"] = [value + (0.3 if at == "reference" else 0.01) for value in row["logprobs"]]
        if at == "lost" and number % 2:
            row["advantages"] = 0.0
        if at == "divided" and number >= 8 and number % 4 == 0:
            row["advantages"] = -0.95 / 1e-6
        if at in ("weights", "engine"):
            row["logprobs"][0] = first
            row["old_logprobs"][0] = first + 0.01 * (1 + row["versions"] if at == "engine" else 1)

    return change


@pytest.mark.parametrize(
    ("at", "says"),
    [
        ("", {}),
        ("weights", {"S16": "the weights do not change"}),
        ("engine", {"S16": "the engine keeps its weights while the trainer's change"}),
        ("lost", {"S17": "rows have no advantage although their rewards differ"}),
        ("divided", {"S17": "advantages are divided by a standard deviation of rounding noise"}),
        ("reference", {"S18": "the reference is not the first policy"}),
    ],
)
def test_what_engine_and_trainer_computed_of_rows(tmp_path, at, says):
    found, _ = doctor(write(tmp_path / "r", change=computed(at)))
    assert {id: found[id]["title"] for id in ("S16", "S17", "S18") if id in found} == says


@pytest.mark.parametrize(
    ("config", "metrics", "steps", "is_accused"),
    [
        ({"lr": 1e-6}, {}, FEW, True),
        ({"lr": 0.0}, {}, FEW, False),
        ({}, {"train/lr": lambda step: 0.0}, FEW, False),
        ({}, {"train/lr": lambda step: 1e-6 * min(step, 1)}, FEW, True),
        ({}, {"train/lr": lambda step: 1e-9 * step}, FEW, False),  # a warm-up that has not ended
        ({}, {"train/grad_norm": lambda step: 0.0}, FEW, False),  # D13
        ({}, None, FEW, False),  # nothing is logged: a model that is not trained
        ({}, {}, 1, False),
    ],
)
def test_weights_stand_still_only_where_updates_move_them(tmp_path, config, metrics, steps, is_accused):
    how = {"steps": steps, "is_logged": metrics is not None}
    folder = write(tmp_path / "r", config, metrics, computed("weights"), **how)
    assert ("S16" in doctor(folder)[0]) == is_accused


def given(apart):
    """Leave rows of data, whose reference is apart from the log-probs in the loss."""

    def change(row, number, rows):
        new = row.pop("logprobs")
        del row["reward"], row["versions"], row["finish_reason"]
        row |= {"learning": {"current_logp": new}, "ref_logprobs": [value + apart for value in new]}

    return change


@pytest.mark.parametrize(
    ("config", "change", "steps", "is_accused"),
    [
        ({}, computed("reference"), FEW - 1, False),
        ({"ref": {"path": "another"}}, computed("reference"), FEW, False),
        ({"ref": {"param_offload": True}}, computed("reference"), FEW, True),
        ({}, given(0.3), FEW, True),
        ({}, given(0.0), FEW, False),
    ],
)
def test_a_reference_is_judged_by_eight_steps_that_name_no_other(tmp_path, config, change, steps, is_accused):
    found, _ = doctor(write(tmp_path / "r", config, change=change, steps=steps))
    assert ("S18" in found) == is_accused


def test_advantages_of_rows_in_succession_are_named(tmp_path):
    def record(by_prompt):
        with Recorder(tmp_path / str(by_prompt)) as recorder:
            for step in range(4):
                rewards = np.random.default_rng(step).normal(size=(4, 4))  # samples, prompts
                centre = rewards.mean(0 if by_prompt else 1, keepdims=True)
                rows = [
                    {"prompt_tokens": [step, p], "completion_tokens": [20, 30 + s], "group": p}
                    | {"reward": rewards[s, p], "advantages": (rewards - centre)[s, p]}
                    for s in range(4)
                    for p in range(4)
                ]
                recorder.step(step, rows)
        rows = read_rows(open_record(tmp_path / str(by_prompt)), Damage())
        return [one.alarm.title for one in examine_samples(rows)]

    assert record(True) == []
    assert record(False) == ["advantages are those of rows in succession, not of the answers to one prompt"]


@pytest.mark.parametrize(
    ("rate", "options", "says"),
    [
        *((lambda s, n=n: 1e-3 * min(1.0, s / n), {"warmup_steps": 5}, "3 times the 5" * (n == 15)) for n in (5, 15, 40)),
        (lambda s: 1e-3, {"lr_scheduler_type": "cosine", "learning_rate": 1e-3}, "lr_scheduler_type is cosine"),
        (lambda s: 1e-3, {"lr_scheduler_type": "cosine", "learning_rate": 1e-3, "min_lr": 1e-3}, ""),
        (lambda s: 1e-3, {"lr_scheduler_type": "constant", "learning_rate": 1e-3}, ""),
    ],
)  # fmt: skip
def test_a_schedule_is_compared_with_its_options(tmp_path, rate, options, says):
    found, _ = doctor(log(tmp_path, {"learning_rate": rate}, options))
    assert (says in found["D51"]["found"]) if says else "D51" not in found


def test_a_policy_that_equals_its_reference_is_named(tmp_path):
    sides = ("rewards/chosen", "rewards/rejected")
    for name, value in (("same", lambda s: 0.0), ("other", lambda s: 0.01 * s)):
        found, _ = doctor(log(tmp_path / name, dict.fromkeys(sides, value)))
        assert ("D50" in found) == (name == "same")
