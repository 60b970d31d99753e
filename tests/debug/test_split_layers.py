"""GRPO with tensor parallelism on the command line.

The run is recorded, and replayed with and without tensor parallelism.
"""

import pytest

from recorder import open_record

pytestmark = pytest.mark.long


def test_grpo_on_two_tensor_parallel_ranks_replays_to_the_bit_and_on_one_rank_within_noise(
    areal_debug, train, tmp_path
):
    options = ("debug.dump_scope=full", "debug.anchor_every_steps=2", "allocation_mode=embedded|fsdp:d1t2")
    done = train("--dump-rollout", tmp_path / "record", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    record = open_record(tmp_path / "record")
    assert (record.header.world_size, record.header.num_ranks) == (2, 1)
    for arguments, num_steps in (((), 3), (("--from-step", 2), 1)):
        done = areal_debug("replay", record.path, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"Bit-identical: {num_steps} of {num_steps} steps" in done.stdout
    done = areal_debug("replay", record.path, "--nproc", 1, "allocation_mode=fsdp:d1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 ranks as fsdp:d1, recorded with 2 ranks as fsdp:d1t2" in done.stdout
