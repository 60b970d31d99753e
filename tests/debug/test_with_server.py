"""Training with a real SGLang server on the CPU.

Weights are updated every step; the recorded run is replayed without the server.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from recorder import open_record

HERE = Path(__file__).parent
OPTIONS = ("sglang.context_length=256", "sglang.dtype=float32")
SERVER = ("allocation_mode=sglang:d1+fsdp:d2", *OPTIONS)
TOGETHER = (
    *("allocation_mode=sglang:d2|fsdp:d2", "enable_offload=true", "rollout.max_head_offpolicyness=0"),
    *("actor.weight_update_mode=disk", *OPTIONS),
)

pytestmark = pytest.mark.sglang


@pytest.mark.long
@pytest.mark.parametrize("server", [SERVER, TOGETHER], ids=["apart", "on-the-same-devices"])
def test_a_run_with_a_server_replays_to_the_same_bits_without_it(areal_debug, train, tmp_path, server):
    done = train("--dump-rollout", tmp_path / "record", *server)
    assert done.returncode == 0, done.stdout + done.stderr
    record = open_record(tmp_path / "record")
    for step in record.steps:
        for rank in range(2):
            batch = record.step(step).batch(rank)
            # The server reports the version that sampled a token: that of the update after the
            # previous step.
            assert set(batch["versions"][batch["loss_mask"] == 1].tolist()) == {step}
            # Engine and trainer agree on every token, so the server has the trained weights.
            stats = record.step(step).outcome(rank).stats
            assert abs(stats["ppo_actor/update/behave_imp_weight/max"] - 1) < 1e-4
            assert abs(stats["ppo_actor/update/behave_imp_weight/min"] - 1) < 1e-4
    done = areal_debug("replay", tmp_path / "record")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Bit-identical: 3 of 3 steps" in done.stdout


@pytest.mark.long
def test_a_server_that_dies_is_named_with_its_log_and_committed_steps_stay(tiny_model, tmp_path):
    command = [
        *(
            Path(sys.executable).parent / "areal-debug",
            "train",
            HERE / "train_tiny.py",
            "--config",
            HERE / "tiny.yaml",
        ),
        *("--dump-rollout", tmp_path / "record", f"actor.path={tiny_model}", f"cluster.fileroot={tmp_path}"),
        *(*SERVER, "total_train_steps=100", "total_train_epochs=100"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    lines = []
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as run:
        for line in run.stdout:
            lines.append(line)
            if line.startswith("step 1 "):
                address = re.search(r"inference servers: \S+:(\d+)", "".join(lines)).group(1)
                kill_listener(int(address))
    output = "".join(lines)
    assert run.returncode == 1, output
    assert f"127.0.0.1:{address}" in output
    assert "last lines of" in output
    assert "Traceback" not in output
    assert len(open_record(tmp_path / "record").steps) >= 2


def kill_listener(port: int) -> None:
    """Kill the server process that was started with this port, and its workers."""
    for process in psutil.process_iter(["cmdline"]):
        if "sglang.launch_server" in (process.info["cmdline"] or []) and str(port) in process.info["cmdline"]:
            for child in process.children(recursive=True):
                child.kill()
            process.kill()
