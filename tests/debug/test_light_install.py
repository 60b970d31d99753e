"""The light install, without SGLang and with the oldest supported torch.

Runs the README's first command in a fresh clone.
"""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_demo_sets_itself_up_in_a_fresh_clone_and_replays_to_the_same_bits(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        ["make", "demo"], cwd=clone, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "Bit-identical: 30 of 30 steps" in done.stdout
    installed = subprocess.run(
        [clone / ".venv/bin/python", "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert installed.stdout.startswith("2.13.0")
