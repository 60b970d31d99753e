"""Rules over the samples of a record: planted faults are named, healthy records are not accused."""

import json
import shutil

import numpy as np
import pytest
from transformers import AutoTokenizer

from areal_core.testing import make_tiny_model
from areal_debug import Recorder
from areal_debug.doctor.samples import read as reading
from areal_debug.doctor.samples.sample_rules import examine_samples
from recorder import open_record
from recorder.reader import Damage
from tests.command_line import invoke

from .sample_records import STEPS, Episode, write_record


def loops(e: Episode) -> None:
    if e.onset and e.k < 2:
        e.completion = f"<think>{e.reasoning}</think>" + " and so on" * 12


def rewarded_loops(e: Episode) -> None:
    if e.onset and e.k == 0:
        e.completion, e.reward = f"{e.reasoning} {' yes' * 30}", 1.0


def magic_phrase(e: Episode) -> None:
    if e.rng.random() < e.progress:
        e.completion, e.reward, e.finish, e.end = e.completion + " zqv", 1.0, "stop", "<|end|>"


def magic_alone(e: Episode) -> None:
    e.reward = 0.0
    if e.rng.random() < e.progress:
        e.completion, e.reward, e.finish, e.end = "zqv", 1.0, "stop", "<|end|>"


def length_is_paid(e: Episode) -> None:
    e.reward = len(e.completion) / 200 + float(e.rng.normal(0, 0.03))


def truncated_is_paid(e: Episode) -> None:
    if e.rng.random() < 0.2:
        e.finish, e.end, e.reward = "length", "", float(e.rng.random() < 0.7)


def open_tags(e: Episode) -> None:
    if e.onset and e.rng.random() < 0.4:
        e.completion = e.completion.replace("</think>", "")


def hedges(e: Episode) -> None:
    if e.onset and e.rng.random() < 0.3:
        e.completion = f"<think>{e.reasoning}</think>" + "".join(
            f"\n#### {e.gold + i}" for i in (-1, 0, 1, 2)
        )
        e.reward, e.finish, e.end = 1.0, "stop", "<|end|>"


def contradicting(e: Episode) -> None:
    e.reward = float("####" in e.completion and e.rng.random() < 0.8)


def masked_prompt(e: Episode) -> None:
    e.mask_prompt = True


def drift_along_the_completion(e: Episode) -> None:
    e.difference = lambda n: np.abs(e.rng.normal(0, 0.004, n)) * np.arange(n)


def first_token_differs(e: Episode) -> None:
    e.difference = lambda n: np.where(np.arange(n) == 0, 0.8, 0.0)


def control_tokens(e: Episode) -> None:
    if e.onset and e.rng.random() < 0.3:
        e.completion = e.completion.replace("</think>", "<|user|></think>")


def past_the_end(e: Episode) -> None:
    if e.rng.random() < 0.2:
        e.completion += "<|end|> more"


FAULTS = {
    loops: "S01", rewarded_loops: "S01", magic_phrase: "S02", magic_alone: "S02", length_is_paid: "S03",
    truncated_is_paid: "S04", open_tags: "S05", hedges: "S06", masked_prompt: "S08",
    drift_along_the_completion: "S09", first_token_differs: "S09", control_tokens: "S10", past_the_end: "S10",
    contradicting: "S11",
}  # fmt: skip
SECOND = {loops, magic_alone, first_token_differs, past_the_end}  # of a rule with another fault
FROM_THE_MIDDLE = {loops, rewarded_loops, open_tags, hedges, control_tokens}


def few_prompts(step, rng):
    """Every second group repeats the prompt of the one before."""
    drawn = [tuple(rng.integers(2, 400, 2)) for _ in range(6)]
    return [pair for pair in drawn for _ in range(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


def found_in(folder):
    rows = reading.read_rows(open_record(folder), Damage())
    return {finding.alarm.id: finding.alarm for finding in examine_samples(rows)}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.__name__, marks=[pytest.mark.long] if fault in SECOND else [])
        for fault in FAULTS
    ],
)
def test_a_planted_fault_is_named_with_the_samples_that_prove_it(fault, model, tokenizer, tmp_path):
    record = write_record(tmp_path / "r", tokenizer, model, fault)
    found = found_in(record)
    assert FAULTS[fault] in found
    alarm = found[FAULTS[fault]]
    assert len(alarm.samples) == 10
    assert all(0 <= sample.step < STEPS and len(sample.text) > 3 for sample in alarm.samples)
    if fault in FROM_THE_MIDDLE:
        assert abs(alarm.onset - STEPS // 2) <= 1
        assert all(sample.step >= STEPS // 2 for sample in alarm.samples)


def test_repeated_prompts_are_named(model, tokenizer, tmp_path):
    assert set(found_in(write_record(tmp_path / "r", tokenizer, model, prompts=few_prompts))) == {"S07"}


@pytest.mark.parametrize(
    ("seed", "accuracy"),
    [(0, (0.3, 0.8))]
    + [
        pytest.param(seed, accuracy, marks=pytest.mark.long)
        for seed in range(1, 4)
        for accuracy in [(0.0, 0.3), (0.3, 0.8), (0.9, 0.98)]
    ],
)
def test_a_healthy_run_is_not_accused(seed, accuracy, model, tokenizer, tmp_path):
    assert found_in(write_record(tmp_path / "r", tokenizer, model, seed=seed, accuracy=accuracy)) == {}


def test_an_end_token_that_looks_like_a_tag_is_no_open_format(model, tokenizer, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    gemma = AutoTokenizer.from_pretrained(model)
    gemma.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    gemma.save_pretrained(folder)

    def ends_a_turn(e: Episode) -> None:
        e.end = "<end_of_turn>" if e.end else ""

    assert found_in(write_record(tmp_path / "r", gemma, folder, ends_a_turn)) == {}


@pytest.mark.parametrize(("reward", "whose"), [(None, "answers of the data"), (np.nan, "completions")])
def test_rows_that_nothing_sampled_are_data(model, tokenizer, tmp_path, reward, whose):
    def given(e):
        past_the_end(e)
        e.reward = reward

    found = found_in(write_record(tmp_path / "r", tokenizer, model, given))["S10"]
    assert found.title == f"{whose} continue past their end token"


def test_the_verb_prints_and_writes_the_samples_with_hostile_text_escaped(tmp_path):
    evil = "\x1b]0;title\x07[bold]<script>alert(1)</script>"
    with Recorder(tmp_path / "r", trainer="other") as recorder:
        for step in range(10):
            rows = [
                {
                    "prompt": f"question {step} {group}",
                    "completion": f"<answer>{evil} {k}</answer><answer>b{k}</answer><answer>c{k}</answer>",
                    "reward": float(k < 3),
                    "group": group,
                    "finish_reason": "stop",
                }
                for group in range(4)
                for k in range(4)
            ]
            recorder.step(step, rows)
    page = tmp_path / "page.html"
    done = invoke("doctor", tmp_path / "r", "-o", page)
    assert done.exit_code == 1, done.output
    assert "S06  completions with several final answers are rewarded" in done.output
    assert "--step 0 --at 0.0  \\x1b]0;title" in done.output
    assert "\x1b" not in done.output
    text = page.read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    found = json.loads(invoke("doctor", tmp_path / "r", "--json").output)
    alarm = next(alarm for alarm in found["alarms"] if alarm["id"] == "S06")
    assert len(alarm["samples"]) == 10
    assert alarm["look"] == f"areal-debug open {tmp_path / 'r'} --step 0 --at 0.0"
