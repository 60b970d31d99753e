"""Ranks with the same rows: one samples on a server, and all take part in its weight updates."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_core.environment import DETERMINISTIC
from areal_core.servers.sglang import SGLANG
from areal_core.servers.wire import weight_version
from recorder import open_record

DEBUG_TESTS = Path(__file__).parents[1] / "debug"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["disk", "xccl"])
def test_two_ranks_that_share_rows_train_with_a_server_that_gets_every_version(
    start_server, tiny_model, tmp_path, mode
):
    server = start_server().wait_until_ready().server
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [DEBUG_TESTS / "train_tiny.py", "--config", DEBUG_TESTS / "tiny.yaml"]
    command += ["--dump-rollout", tmp_path / "record", f"cluster.fileroot={tmp_path}"]
    command += [f"actor.path={tiny_model}", f"actor.weight_update_mode={mode}"]
    command += ["allocation_mode=sglang:d1+fsdp:d1c2", "sglang.context_length=512"]
    # After each update the server's checksums are compared with those of the ranks' weights.
    command += ["rollout.verify_weights_every=1"]
    environment = os.environ | DETERMINISTIC | {"OMP_NUM_THREADS": "1"}
    environment["AREAL_LLM_SERVER_ADDRS"] = server.address
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert weight_version(server, SGLANG) == "3"
    record = open_record(tmp_path / "record")
    assert (record.header.world_size, record.header.num_ranks) == (2, 1)
    assert [len(record.step(step).batch(0)["rewards"]) for step in record.steps] == [16, 16, 16]
