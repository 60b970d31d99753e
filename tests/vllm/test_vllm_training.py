"""GRPO on a real vLLM server: recorded, exact in every token's version, consistent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_core.testing import make_tiny_model
from areal_core.testing.tiny_vision import make_tiny_vision_model
from recorder import open_record

pytestmark = pytest.mark.long
DEBUG_TESTS = Path(__file__).parents[1] / "debug"
EXAMPLES = Path(__file__).parents[2] / "examples"
UPDATES = {
    "xccl": ["actor.weight_update_mode=xccl"],
    "disk": ["actor.weight_update_mode=disk", "rollout.pause_mode=in_place"],
    "adapter": [
        "actor.weight_update_mode=disk",
        "actor.use_lora=true",
        "actor.lora_rank=4",
        "vllm.enable_lora=true",
        "vllm.max_lora_rank=8",
    ],
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=256, num_heads=4)


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "areal_debug", *map(str, arguments)]
    environment = {k: v for k, v in os.environ.items() if k != "AREAL_LLM_SERVER_ADDRS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=560, env=environment)


@pytest.mark.parametrize("mode", ["xccl", "disk"])
def test_images_reach_vllm_and_its_weights_follow(vllm_python, tmp_path, mode):
    # heads as wide as vLLM's CPU attention needs, patches as wide as the engines need
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6]}
    model = make_tiny_vision_model(
        tmp_path / "model", "qwen2_5_vl", patch=14, num_attention_heads=2, rope_parameters=rope
    )
    (tmp_path / "rewards.py").write_text(
        "def reward(prompt, completions, prompt_ids, completion_ids, **row):\n"
        "    return sum(token % 2 for token in completion_ids) / 3\n"
    )
    script = (EXAMPLES / "vision_grpo.py").read_text()
    wanted = "next((REWARDS[name] for name in REWARDS if name in path), EXACT)"
    assert wanted in script
    (tmp_path / "train.py").write_text(script.replace(wanted, '"rewards.reward"'))
    done = run(
        "train", tmp_path / "train.py", "--config", EXAMPLES / "vision_shapes.yaml",
        "--dump-rollout", tmp_path / "record", f"cluster.fileroot={tmp_path}",
        f"cluster.name_resolve.nfs_record_root={tmp_path}/names", f"actor.path={model}",
        "allocation_mode=vllm:d1+fsdp:d1", f"vllm.python={vllm_python}", "vllm.dtype=float32",
        "vllm.max_model_len=512", "total_train_steps=3", "evaluator.freq_steps=null",
        "evaluator.eval_before_train=false", "train_dataset.batch_size=4", "rollout.consumer_batch_size=4",
        "rollout.verify_weights_every=1", "consistency.every_k_steps=1", "actor.recompute_logprob=true",
        f"actor.weight_update_mode={mode}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not compared" not in done.stdout + done.stderr  # each tensor is verified, also of the tower
    (in_loop,) = tmp_path.glob("logs/**/consistency.jsonl")
    readings = [json.loads(line) for line in in_loop.read_text().splitlines()]
    assert [reading["version"] for reading in readings] == [0, 1, 2]
    assert max(reading["mean_abs"] for reading in readings) < 1e-5
    steps = [open_record(tmp_path / "record").step(step).outcome(0).stats for step in range(3)]
    assert all(stats["ppo_actor/update/grad_norm"] > 0 for stats in steps)


@pytest.mark.parametrize("mode", UPDATES)
def test_a_run_on_vllm_is_recorded_and_consistent(vllm_python, model_path, tmp_path, mode):
    done = run(
        "train", DEBUG_TESTS / "train_tiny.py", "--config", DEBUG_TESTS / "tiny.yaml",
        "--dump-rollout", tmp_path / "record", f"cluster.fileroot={tmp_path}",
        f"cluster.name_resolve.nfs_record_root={tmp_path}/names", f"actor.path={model_path}",
        "allocation_mode=vllm:d1+fsdp:d1", f"vllm.python={vllm_python}", "vllm.dtype=float32",
        "vllm.max_model_len=512", "total_train_steps=4", "gconfig.max_new_tokens=16",
        "actor.mb_spec.max_tokens_per_mb=512",
        "rollout.verify_weights_every=1", "consistency.every_k_steps=1", *UPDATES[mode],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not verified" not in done.stdout + done.stderr
    record = open_record(tmp_path / "record")
    assert len(record.steps) == 4
    for step in record.steps:
        batch = record.step(step).batch(0)
        versions = batch["versions"][batch["loss_mask"] == 1]
        assert set(versions) == {step}
    (in_loop,) = tmp_path.glob("logs/**/consistency.jsonl")
    readings = [json.loads(line) for line in in_loop.read_text().splitlines()]
    assert [reading["step"] for reading in readings] == [0, 1, 2, 3]
    for reading in readings:
        assert reading["suspicion"] is None
        assert reading["mean_abs"] < 1e-5
    judged = run("consistency", tmp_path / "record", "--json")
    assert judged.returncode == 0, judged.stdout + judged.stderr
    found = json.loads(judged.stdout)
    assert (found["verdict"], found["causes"][0]["id"]) == ("healthy", "R35")
    assert found["metrics"]["mean_abs"] < 1e-5
