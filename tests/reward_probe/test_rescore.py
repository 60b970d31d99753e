"""A record scored by a second reward function, and rewards that belong to other rows."""

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from areal_debug import Recorder
from areal_debug.reward.pairing import find_pairing
from areal_debug.reward.report import report_of_rescore
from areal_debug.reward.rescore import DataRows, Scored, report_of
from tests.command_line import run as areal_debug

run = partial(areal_debug, "reward", "rescore")

FUNCTION = """
def right(prompt, completions, prompt_ids, completion_ids, answer, **row):
    return 1.0 if completions.strip() == answer else 0.0

def has_digit(prompt, completions, prompt_ids, completion_ids, **row):
    return float(any(letter.isdigit() for letter in completions))
"""
ROWS = [("7+5=", "12"), ("17+5=", "22"), ("2+2=", "4")]


@pytest.fixture
def record(tmp_path):
    """Of each step one sample is paid wrongly and one is right and not paid."""
    with Recorder(tmp_path / "r", trainer="other") as recorder:
        for step in range(3):
            rows = [
                {
                    "prompt": f"<|user|>{prompt}<|end|>",
                    "completion": f"{said}<|end|>",
                    "reward": reward,
                    "group": prompt,
                }
                for prompt, answer in ROWS
                for said, reward in [(answer, 1.0), ("13", 0.0)]
            ]
            rows[1]["reward"] = 1.0
            rows[4]["reward"] = 0.0
            recorder.step(step, rows)
    (tmp_path / "fn.py").write_text(FUNCTION)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": q, "answer": a}) for q, a in ROWS))
    return tmp_path


def test_disagreements_are_counted_by_step_and_listed_with_their_page(record):
    arguments = (record / "r", f"{record / 'fn.py'}:right", "--data", record / "rows.jsonl")
    code, out, _ = run(*arguments)
    assert code == 1
    assert "on 6 of 18 samples: 3 are paid by the record alone (false positives), 3 by" in out
    assert f"areal-debug open {record / 'r'} --step 0 --at 0.1" in out
    found = json.loads(run(*arguments, "--json")[1])
    assert [step["false_positives"] for step in found["steps"]] == [1, 1, 1]
    assert [step["false_negatives"] for step in found["steps"]] == [1, 1, 1]
    places = {
        (d["step"], d["prompt"], d["sample"], d["kind"]) for d in found["disagreements"] if d["step"] == 1
    }
    assert {(sample, kind) for _, _, sample, kind in places} == {(1, "false positive"), (0, "false negative")}


def test_steps_are_chosen_and_a_function_without_its_rows_is_inconclusive(record):
    code, out, _ = run(record / "r", f"{record / 'fn.py'}:right")
    assert code == 2
    assert out.startswith("Inconclusive: 0 of 18 samples have both rewards")
    assert "18 calls failed" in out
    assert "--data FILE gives the function the fields of its rows" in out
    found = json.loads(run(record / "r", f"{record / 'fn.py'}:has_digit", "--from-step", 2, "--json")[1])
    assert [step["step"] for step in found["steps"]] == [2]
    assert run(record / "r", f"{record / 'fn.py'}:right", "--from-step", 9)[0] == 2


def test_other_rewards_of_samples_that_both_pay_are_counted():
    rewards = [(1.0, 0.9), (0.0, 0.0), (float(np.float32(0.1)), 0.1), (math.nan, math.nan)]
    scored = [Scored(0, 0, sample, *both, "") for sample, both in enumerate(rewards)]
    found = report_of(SimpleNamespace(path="r"), "f", scored)
    assert (found.verdict, found.other_values) == ("agree", 1)
    sentence = report_of_rescore(found).sentence
    assert sentence == "on which of 4 samples are paid; 1 have another reward"


def test_one_reward_for_all_is_named():
    found = report_of(
        SimpleNamespace(path="r"), "f", [Scored(0, 0, k, 0.0, float(k % 2), "") for k in range(8)]
    )
    said = report_of_rescore(found).sentence
    assert said.startswith("0 is the recorded reward of all of 8 samples, and f differs on 4: was it called")


def test_a_prompt_finds_the_longest_row_inside_it():
    long = "How many litres are left in the tank after a day?"
    prompts = ("7+5=", "17+5=", long, f"{long} And after two?", "<|im_start|>user\n2*2=<|im_end|>")
    rows = DataRows([{"prompt": p, "answer": p} for p in prompts])
    assert rows.find("user\n2*2=\nassistant\n")["answer"] == prompts[-1]
    assert rows.find("user: 17+5=")["answer"] == "17+5="
    assert rows.find("user: 7+5=")["answer"] == "7+5="
    assert rows.find(f"system\n{long} And after two? ok")["answer"] == f"{long} And after two?"
    assert rows.find("user: 3+5=") is None


GROUPS = np.repeat(np.arange(12), 4)
RIGHT = np.random.default_rng(3).integers(0, 2, 48).astype(float)


def inserted(places):
    values = list(RIGHT)
    for place in places:
        values.insert(place, 0.0)
    return np.array(values[:48])


@pytest.mark.parametrize(
    ("recorded", "first_row", "says"),
    [
        (inserted([10]), 10, "the row 1 before it (1 values too many"),
        (inserted([10, 25, 31]), 10, "the row 3 before it (3 values too many"),
        (np.append(np.delete(RIGHT, 20), 0.0), 20, "the row 1 after it (1 values are missing"),
        (RIGHT[::-1].copy(), 0, "in the reverse order"),
        (RIGHT.reshape(-1, 4).T.ravel(), 1, "in the order of samples"),
    ],
)  # fmt: skip
def test_a_wrong_pairing_is_named(recorded, first_row, says):
    found = find_pairing(5, recorded, RIGHT, GROUPS)
    assert found is not None
    assert (found.step, found.agree > found.before) == (5, True)
    assert abs(found.first_row - first_row) <= 3
    assert says in found.sentence


def test_equal_and_unrelated_rewards_have_no_pairing():
    assert find_pairing(0, RIGHT, RIGHT, GROUPS) is None
    assert find_pairing(0, np.zeros(48), RIGHT, GROUPS) is None
    for seed in range(20):
        other = np.random.default_rng(100 + seed).integers(0, 2, 48).astype(float)
        assert find_pairing(0, other, RIGHT, GROUPS) is None
        strict = np.where(np.random.default_rng(seed).random(48) < 0.3, 0.0, RIGHT)
        assert find_pairing(0, strict, RIGHT, GROUPS) is None
