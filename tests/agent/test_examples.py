"""The examples of conversations, trained on a tiny model.

The calculator runs on an engine with scripted answers.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from areal_core.environment import DETERMINISTIC
from recorder import open_record
from tests.forks import run_forked

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = (
    "allocation_mode=embedded|fsdp:d1",
    "device=cpu",
    "total_train_steps=1",
    "train_dataset.path=arithmetic",
    "train_dataset.dataset_kwargs={num_rows: 8}",
    "train_dataset.batch_size=2",
    "gconfig.n_samples=2",
    "gconfig.max_new_tokens=6",
    "gconfig.max_tokens=400",
    "actor.dtype=float32",
    "actor.gradient_checkpointing=false",
    "actor.weight_update_mode=disk",
    "rollout.max_head_offpolicyness=0",
)


@pytest.mark.long
@pytest.mark.parametrize(("example", "num_turns"), [("multi_turn", 3), ("tool_agent", 1)])
def test_an_example_trains_and_records_rows_of_conversations(example, num_turns, tiny_model, tmp_path):
    record = tmp_path / "record"
    done = run_forked(
        [
            *("-m", "areal_debug.train.script", str(EXAMPLES / f"{example}.py")),
            *("--config", str(EXAMPLES / f"{example}.yaml"), "--dump-rollout", str(record)),
            *(*TINY, f"cluster.fileroot={tmp_path}", f"actor.path={tiny_model}"),
        ],
        os.environ | DETERMINISTIC,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    step = open_record(record).step(0)
    masks = [step.rows(0, row)["loss_mask"] for row in range(step.num_rows(0))]
    assert [int((np.diff(mask, prepend=0) == 1).sum()) for mask in masks] == [num_turns] * 4
