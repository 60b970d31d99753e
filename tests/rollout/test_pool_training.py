"""A training run whose servers are killed and replaced: each sample is trained on once."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from areal_core.environment import DETERMINISTIC
from areal_core.servers.discovery import FolderNames, register_server
from areal_core.servers.sglang import SGLANG
from areal_core.servers.wire import weight_version
from recorder import open_record

DEBUG_TESTS = Path(__file__).parents[1] / "debug"
NUM_KILLS = 20
STEPS_A_KILL = 3
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


def start_training(folder: Path, tiny_model: Path, mode: str) -> subprocess.Popen:
    """Two FSDP ranks that find their servers through the name service."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = [
        f"cluster.fileroot={folder}",
        f"cluster.name_resolve.nfs_record_root={folder}/names",
        f"actor.path={tiny_model}",
        *UPDATES[mode],
        "allocation_mode=sglang:d2+fsdp:d2",
        "sglang.context_length=512",
        "rollout.max_head_offpolicyness=2",
        "rollout.verify_weights_every=4",
        f"total_train_steps={NUM_STEPS}",
        f"train_dataset.dataset_kwargs.num_rows={4 * NUM_STEPS}",
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


def all_are_updated(servers) -> bool:
    return all(weight_version(process.server, SGLANG) != "default" for process in servers)


@pytest.mark.long
@pytest.mark.parametrize("mode", UPDATES)
def test_twenty_kills_during_a_training_run(start_server, tiny_model, tmp_path, mode):
    names, dice = FolderNames(tmp_path / "names"), random.Random(mode)

    def join():
        process = start_server().wait_until_ready()
        register_server(names, "tiny", "test", process.server.address)
        return process

    def trained(num_steps: int) -> bool:
        return len(list((tmp_path / "record" / "steps").glob("*/step.json"))) > num_steps

    log = tmp_path / "train.log"
    servers = [join(), join()]
    training = start_training(tmp_path, tiny_model, mode)
    try:
        for kill in range(NUM_KILLS):
            wait_for(training, log, trained, kill * STEPS_A_KILL)
            wait_for(training, log, all_are_updated, servers)
            victim = servers.pop(dice.randrange(2))
            pause(training, log, dice.uniform(0, 0.3))
            victim.kill()
            servers.append(join())
        assert training.wait(200) == 0, log.read_text()[-3000:]
    finally:
        training.kill()
        training.wait()
    health = json.loads(next(tmp_path.rglob("server_health.json")).read_text())
    assert {process.server.address for process in servers} <= {
        found["address"] for found in health["servers"]
    }
    seen = Counter()
    record = open_record(tmp_path / "record")
    for step in record.steps:
        for rank in range(2):
            batch = record.step(step).batch(rank)
            for row, (start, end) in enumerate(pairwise(batch["cu_seqlens"])):
                versions = batch["versions"][start:end][batch["loss_mask"][start:end] == 1]
                assert len(versions) == 32
                assert step - 2 <= versions.min() <= versions.max() <= step
                seen[int(batch["prompt_id"][row]), int(batch["sample_id"][row])] += 1
    assert seen == Counter({(p, s): 1 for p in range(4 * NUM_STEPS) for s in range(4)})
