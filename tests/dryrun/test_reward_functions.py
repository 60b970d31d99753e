"""Reward functions that a script names, checked without running the script."""

import pytest

from areal_core.errors import RewardError
from areal_debug.train.script_options import check_reward_functions

OWN = "def score(prompt, completion, gold):\n    return 1.0\n"
RIGHT = "def score(prompt, completions, prompt_ids, completion_ids, answer, **row):\n    return 1.0\n"
WITHOUT_ROW = RIGHT.replace(", **row", "")


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(script, **modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        (tmp_path / "train.py").write_text("import no_such_package\n" + script)
        check_reward_functions(tmp_path / "train.py")

    return call


@pytest.mark.parametrize(
    ("script", "modules"),
    [
        (OWN + 'trainer.train(workflow_kwargs={"reward_fn": score})', {}),
        ('from mine import score\ntrainer.train(workflow_kwargs={"reward_fn": score})', {"mine": OWN}),
        ('trainer.train(workflow_kwargs={"reward_fn": "mine.score"})', {"mine": OWN}),
        ('trainer.train("x.RLVRWorkflow", workflow_kwargs={"reward_fn": "mine.py:score"})', {"mine": WITHOUT_ROW}),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_called_is_refused_with_the_right_signature(check, script, modules):
    with pytest.raises(
        RewardError, match=r"def score\(prompt, completions, prompt_ids, completion_ids, answer"
    ):
        check(script, **modules)


@pytest.mark.parametrize(
    ("script", "modules"),
    [
        (RIGHT + 'trainer.train(workflow_kwargs={"reward_fn": score})', {}),
        (WITHOUT_ROW + 'trainer.train(MyWorkflow, workflow_kwargs={"reward_fn": score})', {}),
        ('trainer.train(workflow_kwargs={"reward_fn": "areal_core.reward.gsm8k_reward_fn"})', {}),
        ('trainer.train(workflow_kwargs={"reward_fn": make_reward(3)})', {}),
        ("trainer.train(workflow_kwargs=kwargs)", {}),
        ("def broken(:", {}),
    ],
)
def test_what_can_be_called_or_is_not_known_before_the_run_passes(check, script, modules):
    check(script, **modules)
