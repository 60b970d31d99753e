"""The page on the first run, followed to the letter from an empty folder."""

import re
from pathlib import Path

import pytest

from tests.forks import COMMAND, run_forked

PAGE = (Path(__file__).parents[2] / "docs" / "first_run.md").read_text()


def block(after: str, kind: str = "") -> str:
    """Return the first code block of a kind after a text of the page."""
    found = re.search(rf"```{kind}\n(.*?)```", PAGE[PAGE.index(after) :], re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.fixture
def folder(tmp_path, tiny_model):
    (tmp_path / "train.py").write_text(block("`train.py`:", "python"))
    (tmp_path / "train.yaml").write_text(block("`train.yaml`:", "yaml"))
    header, *rows = block("`rows.csv`,").splitlines(keepends=True)
    (tmp_path / "rows.csv").write_text(header + "".join(rows) * 20)
    (tmp_path / "model").symlink_to(tiny_model)
    return tmp_path


def train(folder, *arguments):
    done = run_forked([COMMAND, "train", "train.py", *arguments], place=folder)
    return done.returncode, done.stdout + done.stderr


def test_five_lines_train_and_keep_the_model(folder):
    assert len((folder / "train.yaml").read_text().splitlines()) == 5
    code, out = train(folder, "total_train_epochs=4")
    assert code == 0, out
    rewards = [
        float(reward)
        for reward in re.findall(r"^step \d+ \(\d+ of 20\)  reward ([0-9.]+)", out, re.MULTILINE)
    ]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) / 5 > 0.4 > 0.1 > rewards[0]
    last = re.search(r"the model in (\S+)$", out, re.MULTILINE)
    assert last is not None
    assert (folder / last.group(1) / "model.safetensors").is_file()
    notes = [line for line in out.splitlines() if line.startswith("train.yaml: ")]
    assert notes == [line for line in PAGE.splitlines() if line.startswith("train.yaml: ")]


@pytest.mark.long
def test_recovery_needs_its_mode_alone(folder):
    again = ("total_train_epochs=4", "recover.mode=auto", "--dump-rollout")
    code, out = train(folder, "total_train_steps=10", *again)
    assert (code, "resumed at" in out) == (0, False)
    assert [path.name for path in folder.glob("runs/checkpoints/*/train/trial0/recover/*")] == ["step-000010"]
    code, out = train(folder, "total_train_steps=12", *again)
    assert code == 0, out
    assert re.search(r"resumed at step 10: Continues: .*between step 9 and step 10.* --at 10\)", out), out
    assert "continuing at step 10 from runs/checkpoints/" in out
    assert "\nstep 10 (11 of 12) " in out


def test_a_reward_function_of_another_signature_is_refused_before_anything_starts(folder):
    script = folder / "train.py"
    script.write_text(script.read_text().replace("prompt_ids, completion_ids, answer, **row", "gold"))
    code, out = train(folder)
    assert (code, len(list(folder.glob("runs/*")))) == (2, 0)
    assert out.endswith(
        "def reward(prompt, completions, prompt_ids, completion_ids, answer, **row) -> float\n"
    )


def test_the_help_of_the_script_has_no_traceback(folder):
    done = run_forked(["train.py", "--help"], place=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python SCRIPT.py --config FILE.yaml")
