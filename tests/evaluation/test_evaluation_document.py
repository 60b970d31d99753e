"""The recipes of docs/evaluation.md, run as they are written from an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
RECIPES = PAGE[PAGE.index("## Recipes") :]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", RECIPES, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Every line of the blocks of commands; the one with a table is what a command prints."""
    lines = [line for kind, text in BLOCKS if not kind for line in text.splitlines()]
    return [line for line in lines if line.startswith(("python ", "areal-debug "))]


@pytest.fixture
def folder(tmp_path):
    names = re.findall(r"`(\w+\.(?:py|yaml))`:", RECIPES)
    texts = [text for kind, text in BLOCKS if kind in ("python", "yaml")]
    for name, text in zip(names, texts, strict=True):
        (tmp_path / name).write_text(text)
    assert set(names) == {"rows.py", "sums.py", "sums.yaml", "warmup.yaml"}
    return tmp_path


def run(line: str, folder: Path) -> str:
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        line, shell=True, cwd=folder, env=os.environ | path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.long  # seven commands of about ten seconds
def test_the_recipes_work_as_written(folder):
    printed = {line: run(line, folder) for line in commands()}
    evaluations = [text for line, text in printed.items() if line.startswith("areal-debug eval")]
    baseline, after_warmup, on_test, on_train = evaluations
    assert baseline.splitlines()[1].startswith("model: mean reward 0.0")
    assert "Against model: final: better" in after_warmup
    assert "Against final: globalstep19: better" in on_test
    assert "36 validation prompts, 8 samples of each, temperature 1" in on_test
    assert "64 training prompts" in on_train
