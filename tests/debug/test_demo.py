"""The two demos: on a tiny model, and on a real model with a real server."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from areal_core.telemetry.loggers import read_stats
from areal_debug.doctor.read import read_run
from recorder import open_record

ROOT = Path(__file__).parents[2]


def test_demo_trains_records_and_replays_to_the_same_bits(areal_debug, tmp_path):
    done = areal_debug("demo", "--output", tmp_path / "demo", "--steps", 6)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Bit-identical: 6 of 6 steps" in done.stdout
    assert re.search(r"reward 0\.\d\d [▁▂▃▄▅▆▇█]{6} 0\.\d\d", done.stdout)
    assert open_record(tmp_path / "demo" / "record").steps == tuple(range(6))
    (stats,) = (tmp_path / "demo").glob("runs/logs/*/demo/grpo/stats.jsonl")
    rewards = [line["ppo_actor/task_reward/avg"] for line in read_stats(stats)]
    log = tmp_path / "demo" / "logs" / "grpo" / "trainer.log"
    assert {line.split(" ")[0] for line in log.read_text().splitlines()} == {"demo/grpo:", "step"}
    assert read_run(log).series["reward"].values.tolist() == [round(reward, 3) for reward in rewards]
    # SFT leaves it right sometimes, and GRPO improves on that.
    assert 0.1 < sum(rewards[:3]) / 3 < sum(rewards[-3:]) / 3


@pytest.mark.long
@pytest.mark.sglang
def test_the_real_model_trains_with_its_server_and_replays_without_it(tmp_path):
    command = [sys.executable, ROOT / "examples" / "demo_real.py", "--output", tmp_path / "real"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=3000, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Bit-identical: 4 of 4 steps" in done.stdout
    record = open_record(tmp_path / "real" / "record")
    assert record.header.num_ranks == 2
    for step in record.steps:
        batches = [record.step(step).batch(rank) for rank in range(2)]
        assert sum(len(batch["rewards"]) for batch in batches) == 8 * 4
        # Every token was sampled by the weights of the update after the previous step.
        assert {v for batch in batches for v in batch["versions"][batch["loss_mask"] == 1].tolist()} == {step}
    # bfloat16 on both sides: engine and trainer differ by the rounding of that format.
    stats = record.step(0).outcome(0).stats
    assert abs(stats["ppo_actor/update/behave_approx_kl/avg"]) < 0.02
