"""The probe names every faulty reward function, and accuses no sound one."""

import tomllib
from pathlib import Path

import pytest

from areal_core.errors import RewardError
from areal_debug.reward.answers import Question, Setting, final_answer, mentions, question_of, same
from areal_debug.reward.probe import probe

FUNCTIONS = Path(__file__).parent / "functions.py"
QUESTIONS = [
    ("A farm has 16 hens and sells 9 eggs of each for 2 dollars.", "16 * 9 = 144\n144 * 2 = 288\n#### 288"),
    ("Tom reads 12 pages a day for 5 days.", "12 * 5 = <<12*5=60>>60\n#### 60"),
    ("A tank holds 40 litres, a third pump adds 35.", "40 + 35 = 75\n#### 75"),
]
TABLE = tomllib.loads(FUNCTIONS.with_suffix(".toml").read_text())
QUICK = {"pays_format_most", "abstaining_is_zero"}


def some_long(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in names]


def questions():
    return [question_of({"prompt": q, "answer": a}, None) for q, a in QUESTIONS]


@pytest.mark.parametrize("name", some_long(TABLE["faulty"]))
def test_a_faulty_function_is_named_with_what_it_pays_for(name):
    report = probe(f"{FUNCTIONS}:{name}", "questions", questions(), timeout_s=2.0)
    assert report.verdict == "problem"
    assert TABLE["faulty"][name]["named"] in report.sentence


@pytest.mark.parametrize("name", some_long(TABLE["sound"]))
def test_a_sound_function_is_not_accused(name):
    report = probe(f"{FUNCTIONS}:{name}", "questions", questions(), timeout_s=5.0)
    assert [found for found in report.findings if found.is_problem] == []
    assert report.verdict == "sound"
    assert report.formats


@pytest.mark.long
def test_the_rewards_of_the_core_are_sound():
    for function in ("gsm8k_reward_fn", "arithmetic_reward_fn"):
        name = f"areal_core.reward.functions:{function}"
        chosen = questions()
        if function == "arithmetic_reward_fn":
            chosen = [question_of({"prompt": q.prompt, "answer": q.gold}, None) for q in chosen]
        assert probe(name, "questions", chosen, timeout_s=15.0).verdict == "sound"


def test_expected_answers_are_found_and_compared():
    assert final_answer("6 * 3 = 18\n#### 1,018") == "1,018"
    assert final_answer("so \\boxed{x+1}") == "x+1"
    assert question_of({"prompt": "p", "reward_model": {"ground_truth": "7"}}, None).gold == "7"
    assert question_of({"prompt": "p", "answer": 3.0}, None).gold == "3"
    assert same("1,018", "1018.0")
    assert not same("Paris", "London")
    assert mentions("it costs 1,018 dollars", "1018")
    assert not mentions("it costs 10180 dollars", "1018")
    wrong = Setting((), ("B", "C")).wrong_for(Question({}, "p", "B", "B"))
    assert wrong == "C"


def test_a_file_that_fails_as_it_is_imported_is_no_faulty_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("import json\njson.loads('{bad')\n")
    with pytest.raises(
        RewardError, match=r"broken\.py cannot be imported: it raised JSONDecodeError: .*\(broken\.py:2\)"
    ):
        probe("broken.py:reward", "data", [Question({}, "1 + 1", "2", "2")], 5.0)
