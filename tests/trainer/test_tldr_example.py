"""The TL;DR example: its data, and its three steps with a few updates each."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_core.telemetry.loggers import read_stats
from replayer.request import Request
from replayer.run import replay_and_compare

ROOT = Path(__file__).parents[2]
specification = importlib.util.spec_from_file_location("tldr_data", ROOT / "examples/tldr_data.py")
tldr_data = importlib.util.module_from_spec(specification)
specification.loader.exec_module(tldr_data)


@pytest.mark.long
def test_the_three_steps_run_one_after_the_other_and_the_last_replays(tmp_path):
    def run(name, *arguments):
        subprocess.run([sys.executable, f"examples/{name}.py", *arguments], cwd=ROOT, check=True, timeout=300)

    def train(name, *overrides):
        config = f"examples/{name}.yaml"
        files = [f"cluster.fileroot={tmp_path}", f"train_dataset.path={tmp_path}/data"]
        run(name, "--config", config, *files, "total_train_steps=2", "evaluator.freq_steps=2", *overrides)
        [stats] = tmp_path.glob(f"logs/*/{name.replace('_', '-')}/trial0/stats.jsonl")
        return read_stats(stats)

    run("tldr_data", str(tmp_path / "data"))
    assert len((tmp_path / "data/train.jsonl").read_text().splitlines()) == 4096
    assert json.loads((tmp_path / "data/test.jsonl").read_text().splitlines()[0])["best"]
    assert "eval-sft/loss/avg" in train("tldr_sft", f"actor.path={tmp_path}/data/model")[-1]
    assert "eval-rw/correct_ratio/avg" in train("tldr_reward")[-1]
    last = train("tldr_ppo", "debug.dump_rollout_data=true")[-1]
    assert {"reward_model/score/avg", "ppo_critic/critic_loss/avg", "eval-rollout/reward"} <= last.keys()
    [record] = tmp_path.glob("logs/*/tldr-ppo/trial0/record")
    report = replay_and_compare(Request(str(record), 0, 1))
    assert report.identical, report.first_different
