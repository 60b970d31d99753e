"""A training run whose servers are killed and replaced: each sample is trained on once."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_core.environment import DETERMINISTIC
from areal_core.servers.discovery import FolderNames, register_server
from areal_core.servers.sglang import SGLANG
from areal_core.servers.wire import weight_version

DEBUG_TESTS = Path(__file__).parents[1] / "debug"
NUM_KILLS = 20
# Training continues while a server starts, which takes some steps, more on a busy machine.
NUM_STEPS = 8 * NUM_KILLS
UPDATES = {
    "disk": ["actor.weight_update_mode=disk"],
    "xccl": ["actor.weight_update_mode=xccl"],
    "adapter": [
        "actor.weight_update_mode=disk",
        "actor.use_lora=true",
        "actor.lora_rank=4",
        "sglang.enable_lora=true",
        "sglang.max_lora_rank=4",
    ],
}


def start_training(
    folder: Path, tiny_model: Path, mode: str, num_steps: int = NUM_STEPS, max_staleness: int = 2
) -> subprocess.Popen:
    """Two FSDP ranks that find their servers through the name service."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = [
        f"cluster.fileroot={folder}",
        f"cluster.name_resolve.nfs_record_root={folder}/names",
        f"actor.path={tiny_model}",
        *UPDATES[mode],
        "allocation_mode=sglang:d2+fsdp:d2",
        "sglang.context_length=512",
        f"rollout.max_head_offpolicyness={max_staleness}",
        "rollout.verify_weights_every=4",
        f"total_train_steps={num_steps}",
        f"train_dataset.dataset_kwargs.num_rows={4 * num_steps}",
        "gconfig.max_new_tokens=32",
        "gconfig.ignore_eos=true",
    ]
    script = [
        DEBUG_TESTS / "train_tiny.py",
        "--config",
        DEBUG_TESTS / "tiny.yaml",
        "--dump-rollout",
        folder / "record",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "AREAL_LLM_SERVER_ADDRS"} | {
        "OMP_NUM_THREADS": "1",
        **DETERMINISTIC,
    }
    with (folder / "train.log").open("w") as log:
        return subprocess.Popen(
            [*command, *map(str, script), *options], stdout=log, stderr=log, env=environment
        )


def wait_for(training: subprocess.Popen, log: Path, happened, *arguments) -> None:
    while not happened(*arguments):
        pause(training, log, 0.05)


def pause(training: subprocess.Popen, log: Path, seconds: float) -> None:
    """Let a running training continue for a while."""
    try:
        code = training.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    pytest.fail(f"the training ended too early, with {code}: {log.read_text()[-3000:]}")


@pytest.mark.long
@pytest.mark.parametrize("mode", ["disk", "xccl"])
def test_training_continues_within_15_s_when_a_server_is_stopped(start_server, tiny_model, tmp_path, mode):
    names, log, num_steps = FolderNames(tmp_path / "names"), tmp_path / "train.log", 60
    servers = [start_server().wait_until_ready() for _ in range(2)]
    for process in servers:
        register_server(names, "tiny", "test", process.server.address)

    def num_trained() -> int:
        return len(list((tmp_path / "record" / "steps").glob("*/step.json")))

    training = start_training(tmp_path, tiny_model, mode, num_steps, max_staleness=0)
    try:
        wait_for(training, log, lambda: num_trained() >= 4)
        servers[1].stop()
        begin, before = time.monotonic(), num_trained()
        wait_for(training, log, lambda: num_trained() >= before + 2)
        assert time.monotonic() - begin < 15.0
        servers[1].go_on()
        version = int(weight_version(servers[0].server, SGLANG))
        wait_for(training, log, lambda: int(weight_version(servers[1].server, SGLANG)) > version)
        assert training.wait(200) == 0, log.read_text()[-3000:]
    finally:
        training.kill()
        training.wait()
    lines = log.read_text().splitlines()
    hung = [line for line in lines if f"inference server hung: {servers[1].server.address}" in line]
    assert len(hung) <= 2  # one for each rank's client, or none if it had no request running
    assert sum("inference server serving" in line for line in lines) >= 2
    document = json.loads(next(tmp_path.rglob("server_health.json")).read_text())
    assert {found["address"] for found in document["servers"]} == {p.server.address for p in servers}
    assert all(found["ok"] > 0 and found["rejected"] == 0 for found in document["servers"])
