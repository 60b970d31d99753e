"""Weight updates of a fake server: order of the calls, and failures on every rank."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_core.launch.torchrun import run_ranks
from areal_core.rollout.errors import WeightUpdateFailed
from areal_core.servers.weight_update import BroadcastUpdate

WEIGHTS = {"a": torch.arange(4.0), "b": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.zeros(3)}


def test_disk_update_pauses_loads_resumes_and_leaves_no_files(start_fake, update_by_disk, tmp_path):
    fake = start_fake()
    written = {}
    update = update_by_disk(fake, bucket_bytes=24)
    post = update.pool.post

    def look_then_post(call, **options):
        if call.path == "/update_weights_from_disk":
            folder = Path(call.payload["model_path"])
            for file in sorted(folder.glob("*.safetensors")):
                written.update(load_file(file))
            assert (folder / "config.json").exists()
        return post(call, **options)

    update.pool.post = look_then_post
    update.send(iter(WEIGHTS.items()), 3)

    folder = str(tmp_path / "update" / "v3")
    assert fake.calls == [
        ("/pause_generation", {"mode": "abort"}),
        ("/update_weights_from_disk", {"model_path": folder, "weight_version": "3", "flush_cache": True}),
        ("/continue_generation", {}),
    ]
    assert written.keys() == WEIGHTS.keys()
    assert all(torch.equal(written[name], WEIGHTS[name]) for name in WEIGHTS)
    assert list((tmp_path / "update").iterdir()) == []


def test_after_a_failed_update_generation_continues_and_all_weights_were_iterated(
    start_fake, update_by_disk, tmp_path
):
    fake = start_fake()
    fake.refuse["/update_weights_from_disk"] = (400, {"success": False, "message": "size mismatch for a"})
    weights = iter(WEIGHTS.items())
    with pytest.raises(WeightUpdateFailed, match="size mismatch for a"):
        update_by_disk(fake).send(weights, 1)
    assert fake.routes()[-1] == "/continue_generation"
    assert list(weights) == []
    assert list((tmp_path / "update").iterdir()) == []


def test_a_server_that_does_not_join_the_broadcast_is_reported_at_once(start_fake, pool_of):
    fake = start_fake()
    fake.refuse["/init_weights_update_group"] = (400, {"success": False, "message": "no such backend"})
    weights = iter(WEIGHTS.items())
    with pytest.raises(WeightUpdateFailed, match="no such backend"):
        BroadcastUpdate(pool_of(fake), "gloo", timeout_s=5.0).send(weights, 1)
    assert list(weights) == []


RANK = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from areal_core.servers.pool import ServerPool
from areal_core.servers.server import Server
from areal_core.rollout.errors import WeightUpdateFailed
from areal_core.servers.weight_update import DiskUpdate
from areal_core.servers.sglang import SGLANG

dist.init_process_group("gloo")
rank = dist.get_rank()

def weights():
    for i in range(5):
        tensor = torch.ones(4)
        dist.all_reduce(tensor)  # as full_tensor() does: hangs unless every rank comes along
        yield f"w{i}", tensor

pool = ServerPool([Server(sys.argv[1])], SGLANG) if rank == 0 else None
try:
    DiskUpdate(pool, Path(sys.argv[2]) / "update", Path(sys.argv[2]), bucket_bytes=1).send(weights(), 1)
except WeightUpdateFailed as failed:
    print(f"rank {rank}: {failed}\\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(7)
"""


@pytest.mark.long
def test_a_failure_on_rank_0_reaches_every_rank(start_fake, tmp_path, capfd):
    fake = start_fake()
    fake.refuse["/pause_generation"] = (503, {"success": False, "message": "shutting down"})
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    (tmp_path / "config.json").write_text("{}")
    code = run_ranks([str(script), fake.server.address, str(tmp_path)], 2, {}, tmp_path / "logs")
    log = (tmp_path / "logs" / "trainer.log").read_text()
    assert code == 7
    for rank in (0, 1):
        assert (
            f"rank {rank}: the weights did not reach the servers: RequestRefused: {fake.server.address}/pause_generation"
            in log
        )
    assert "shutting down" in capfd.readouterr().out
