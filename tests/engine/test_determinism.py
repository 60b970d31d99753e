import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from areal_core.engine import determinism
from areal_core.engine.determinism import enforce_determinism, rng_state, set_rng_state
from areal_core.environment import DETERMINISTIC
from areal_core.errors import DeterminismError

ENFORCE = "from areal_core.engine.determinism import enforce_determinism; enforce_determinism('cuda'); "
REPORT = "import torch; print(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())"


def run(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    others = {name: value for name, value in os.environ.items() if name not in DETERMINISTIC}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=others | environment
    )


@pytest.mark.long
def test_deterministic_mode_is_strict_when_everything_was_set_in_time():
    done = run(ENFORCE + REPORT, DETERMINISTIC)
    assert done.stdout.split() == ["True", "False"], done.stderr


@pytest.mark.long
def test_all_missing_variables_are_listed_at_once_with_a_command_line_that_works():
    done = run(ENFORCE + REPORT, {"NCCL_ALGO": "Tree"})
    *_, listed, command = done.stderr.rstrip().splitlines()
    assert [name for name in DETERMINISTIC if f"{name}={DETERMINISTIC[name]} (" in listed] == [*DETERMINISTIC]
    assert "NCCL_ALGO=Ring (is 'Tree')" in listed
    again = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert again.stdout.split() == ["True", "False"], again.stderr


def test_under_torchrun_the_variables_are_exported(monkeypatch):
    variables = {"TORCHELASTIC_RUN_ID": "none", **DETERMINISTIC, "PYTHONHASHSEED": "1"}
    monkeypatch.setattr(determinism, "environment_at_start", lambda: variables)
    with pytest.raises(DeterminismError) as refused:
        enforce_determinism("cuda")
    assert str(refused.value).splitlines()[-1] == "    export PYTHONHASHSEED=0"


def test_generators_continue_from_a_restored_state_with_the_same_numbers():
    def draw():
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.normal(),
            float(np.random.rand()),
            float(torch.rand(())),
        ]

    random.gauss(0, 1)  # leaves half of a pair unused, which belongs to the state
    np.random.normal()
    state = rng_state()
    first = draw()
    assert draw() != first
    set_rng_state(state)
    assert draw() == first
