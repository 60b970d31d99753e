"""Terms that do nothing, counters and references that go back, end reasons, copies, masks, groups."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from areal_core.testing import make_tiny_tokenizer
from areal_debug import Recorder
from areal_debug.doctor.samples.read import read_rows
from areal_debug.doctor.samples.sample_rules import examine_samples
from recorder import open_record
from recorder.reader import Damage
from recorder.testing import gatherers

from .runs import diagnosed

STEPS, FEW, END = 20, 8, 9


def doctor(path):
    _, found = diagnosed(path)
    return {alarm["id"]: alarm for alarm in found["alarms"]}, found["checks"]


def write(folder, config=None, metrics=None, change=None, model=None, steps=STEPS):
    """Write a run whose rows `change` may spoil: it gets a row and its number in the step."""
    rng = np.random.default_rng(1)
    with Recorder(folder, trainer="slime", config=config or {}, model=model) as recorder:
        for step in range(steps):
            rows = []
            for number in range(16):
                size = int(rng.integers(6, 12))
                tokens = [*rng.integers(20, 90, size - 1).tolist(), END]
                row = {
                    "prompt_tokens": [1, 100 + number // 4, 2],
                    "completion_tokens": tokens,
                    "group": number // 4,
                }
                row |= {
                    "reward": float(rng.random() < 0.3 + step / 40),
                    "finish_reason": "stop",
                    "versions": step,
                }
                row |= {"logprobs": (-rng.exponential(1.5, size)).tolist()}
                if change is not None:
                    change(row, number, rows)
                rows.append(row)
            stats = {name: value(step) for name, value in (metrics or {}).items()}
            recorder.step(step, rows, stats={"train/grad_norm": 0.5 + 0.1 * rng.random()} | stats)
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
    found, _ = doctor(write(tmp_path / "r", config, {"train/kl_loss": value}))
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
    found, _ = doctor(write(tmp_path / "r", metrics={name: value}))
    assert (found[id]["onset"] if id in found else None) == onset


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    make_tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": END, "bos_token_id": 3})
    )
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

    found, _ = doctor(
        write(tmp_path / "r", metrics={"train/loss": lambda step: 0.1}, change=broken, steps=FEW)
    )
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


def templated(row, number, rows):
    without(0)(row, number, rows)
    row["completion_tokens"][0] = 33


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
        (split, {"S07": "samples of a prompt are not one group: each is a group of its own"}),
        (doubled, {"S15": "rows begin with two begin tokens"}),
        *((sound, {}) for sound in (asked, without(2), templated, alone)),
    ],
)
def test_masks_groups_and_begin_tokens(tmp_path, model, change, says):
    found, _ = doctor(write(tmp_path / "r", change=change, model=model, steps=FEW))
    assert {id: found[id]["title"] for id in ("S07", "S14", "S15") if id in found} == says


@pytest.mark.parametrize("apart", [0, 4])
def test_rows_of_data_on_several_ranks_are_named(tmp_path, apart):
    def record(rank, gather):
        with Recorder(tmp_path / "r", rank=rank, num_ranks=2, gather=gather) as recorder:
            for step in range(6):
                prompts = [[3, 100 + step, 10 + number + apart * rank, 2] for number in range(4)]
                recorder.step(
                    step, [{"prompt_tokens": p, "completion_tokens": [20, 30, END]} for p in prompts]
                )

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(record, range(2), gatherers(2)))
    rows = read_rows(open_record(tmp_path / "r"), Damage())
    assert [one.alarm.title for one in examine_samples(rows)] == ["ranks train on the same rows"] * (
        not apart
    )


def test_a_policy_that_equals_its_reference_is_named(tmp_path):
    sides = ("rewards/chosen", "rewards/rejected")
    for name, value in (("same", lambda s: 0.0), ("other", lambda s: 0.01 * s)):
        found, _ = doctor(write(tmp_path / name, metrics=dict.fromkeys(sides, value)))
        assert ("D50" in found) == (name == "same")
