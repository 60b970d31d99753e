"""Trainer and engine that wait for each other in a weight update: frames of several frameworks."""

import pytest

from hangdoctor.diagnose import diagnose
from hangdoctor.model import Diagnosis
from hangdoctor.parse.read import read_snapshot

C10D = "torch/distributed/distributed_c10d.py"
TRAINER = f"""    broadcast ({C10D}:2810)
    push_weights (rl/loop.py:88)
    train (rl/loop.py:40)
    <module> (rl/loop.py:120)
"""
RECEIVER = f"""    broadcast ({C10D}:2810)
    receive_weights (rl/generator.py:31)
    run (rl/generator.py:70)
"""


def read(tmp_path, text: str, world_size: int | None = None) -> Diagnosis:
    """Diagnose a paste."""
    (tmp_path / "paste.txt").write_text(text)
    return diagnose(read_snapshot([tmp_path], world_size))


FRAMEWORKS = {
    "own engine pauses": f"""trainer rank 0:
{TRAINER}
engine rank 0:
    wait (threading.py:327)
    pause_until_idle (rl/generator.py:52)
    run (rl/generator.py:71)
""",
    "TRL against a vLLM server": f"""trainer rank 0:
    broadcast ({C10D}:2810)
    update_named_param (trl/generation/vllm_client.py:818)
    sync_weights (trl/generation/vllm_generation.py:520)
    _inner_training_loop (transformers/trainer.py:2400)
engine rank 0:
    dequeue (vllm/distributed/device_communicators/shm_broadcast.py:490)
    worker_busy_loop (vllm/v1/executor/multiproc_executor.py:700)
""",
    "verl with a checkpoint engine": f"""trainer rank 0:
    broadcast ({C10D}:2810)
    send_weights (verl/checkpoint_engine/nccl_checkpoint_engine.py:300)
    update_weights (verl/workers/engine_workers.py:500)
engine rank 0:
    wait (threading.py:327)
    abort_all_requests (verl/workers/rollout/vllm_rollout/vllm_async_server.py:700)
""",
    "AReaL against SGLang": f"""trainer rank 0:
    broadcast ({C10D}:2810)
    _update_bucket_weights_from_distributed (areal/engine/fsdp_engine.py:510)
    update_weights (areal/engine/fsdp_engine.py:600)
engine rank 0:
    recv_pyobj (zmq/sugar/socket.py:990)
    recv_requests (sglang/srt/managers/scheduler.py:1100)
    event_loop_overlap (sglang/srt/managers/scheduler.py:900)
""",
    "the update of this project": f"""trainer rank 0:
    broadcast ({C10D}:2810)
    broadcast (areal_core/servers/update_group.py:90)
    _broadcast (areal_core/servers/weight_update.py:240)
engine rank 0:
    wait (threading.py:327)
    _pause (areal_core/testing/server.py:185)
""",
    "NeMo-RL": f"""policy rank 0:
    broadcast ({C10D}:2810)
    packed_broadcast_producer (nemo_rl/utils/packed_tensor.py:60)
    broadcast_weights_for_collective (nemo_rl/models/policy/workers/dtensor_policy_worker.py:900)
engine rank 0:
    wait (threading.py:327)
    generate (nemo_rl/models/generation/vllm/vllm_worker.py:400)
""",
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_side_that_is_not_in_the_update_is_to_blame(tmp_path, name):
    diagnosis = read(tmp_path, FRAMEWORKS[name].replace("policy rank", "trainer rank"))
    assert (diagnosis.label, diagnosis.culprit_ranks) == ("weight_sync_deadlock", ("engine_rank_0",)), (
        diagnosis.summary
    )
    assert "trainer rank 0 waits in broadcast" in diagnosis.summary


def test_a_pause_is_named(tmp_path):
    diagnosis = read(tmp_path, FRAMEWORKS["own engine pauses"])
    assert "pause to begin or end in pause_until_idle (rl/generator.py:52)" in diagnosis.summary


def test_both_in_the_broadcast_means_that_a_member_of_the_group_is_absent(tmp_path):
    diagnosis = read(tmp_path, f"trainer rank 0:\n{TRAINER}engine rank 0:\n{RECEIVER}")
    assert (diagnosis.label, diagnosis.confidence, diagnosis.culprit_ranks) == (
        "weight_sync_deadlock",
        "medium",
        (),
    )
    assert "wrong world size" in diagnosis.summary


def test_a_group_that_does_not_form_is_no_deadlock_of_the_start(tmp_path):
    joins = f"""    _store_based_barrier ({C10D}:900)
    init_weights_update_group ({{file}}:30)
"""
    text = f"trainer rank 0:\n{joins.format(file='rl/loop.py')}engine rank 0:\n{joins.format(file='sglang/srt/x.py')}"
    diagnosis = read(tmp_path, text)
    assert diagnosis.label == "weight_sync_deadlock"
    assert "has not formed" in diagnosis.summary


def test_an_engine_that_could_not_be_read_is_to_blame(tmp_path):
    gone = "Error: Failed to get process executable name. Check that the process is running.\n"
    diagnosis = read(tmp_path, f"trainer rank 0:\n{TRAINER}engine rank 0:\n{gone}")
    assert (diagnosis.label, diagnosis.culprit_ranks) == ("weight_sync_deadlock", ("engine_rank_0",))
    assert "engine_rank_0 is on the other side and gone" in diagnosis.summary


def test_an_engine_that_was_not_read_is_not_to_blame(tmp_path):
    diagnosis = read(tmp_path, f"rank 0:\n{TRAINER}")
    assert (diagnosis.label, diagnosis.culprit_ranks) == ("weight_sync_deadlock", ())
    assert "the engine, which must be on the other side, was not read" in diagnosis.summary


def test_the_trainer_is_to_blame_where_it_waits_for_samples_and_the_engine_for_weights(tmp_path):
    diagnosis = read(
        tmp_path,
        f"""trainer rank 0:
    wait (threading.py:327)
    result (concurrent/futures/_base.py:451)
    next_batch (rl/loop.py:60)
    train (rl/loop.py:40)
engine rank 0:
{RECEIVER}""",
    )
    assert (diagnosis.label, diagnosis.culprit_ranks) == ("weight_sync_deadlock", (0,))


@pytest.mark.parametrize(
    ("engine", "label"),
    [
        (
            "    copy_param (rl/generator.py:10)\n    receive_weights (rl/generator.py:31)\n",
            "weight_sync_deadlock",
        ),
        (f"    barrier ({C10D}:3)\n    save (rl/generator.py:3)\n", "weight_sync_deadlock"),
    ],
)
def test_an_engine_that_loads_what_it_received_is_not_accused(tmp_path, engine, label):
    text = f'trainer rank 0:\n{TRAINER}engine rank 0:\nThread 7 (active): "MainThread"\n{engine}'
    accused = read(tmp_path, text).label == label
    assert accused == ("barrier" in engine)


def test_a_trainer_rank_outside_the_update_explains_the_wait_of_the_others(tmp_path):
    text = f"""rank 0:
{TRAINER}
rank 1:
    wait (threading.py:327)
    get (queue.py:171)
    _try_get_data (torch/utils/data/dataloader.py:1131)
    train (rl/loop.py:30)
"""
    assert read(tmp_path, text).label == "dataloader_stall"
