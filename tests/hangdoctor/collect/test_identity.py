"""The rank a process claims to be, from literal environments and command lines."""

import pytest

from hangdoctor.collect.discover import ProcessIdentity, identify

TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
}


@pytest.mark.parametrize(
    ("environment", "command", "expected"),
    [
        (TORCHRUN, ("python", "train.py"), ProcessIdentity(9, 16, "trainer", "node-0:29500")),
        (
            {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77"},
            ("python", "train.py"),
            ProcessIdentity(3, 4, "trainer", "77", inferred=True),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
            ("python", "train.py"),
            ProcessIdentity(2, 4, "trainer", ""),
        ),
        ({}, ("python", "train.py", "--rank", "5"), ProcessIdentity(5, None, "trainer", "")),
        ({}, ("python", "train.py", "--global-rank=6"), ProcessIdentity(6, None, "trainer", "")),
        ({}, ("python", "train.py", "--local_rank=6"), ProcessIdentity(None, None, "trainer", "")),
        ({"RANK": "not a number"}, ("python", "train.py"), ProcessIdentity(None, None, "trainer", "")),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            ("python", "train_reward_model.py"),
            ProcessIdentity(0, 2, "trainer", ""),
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "ROLE_NAME": "reference"},
            ("python", "score.py"),
            ProcessIdentity(0, 2, "reference", ""),
        ),
        ({}, ("sglang::scheduler_TP0",), ProcessIdentity(None, None, "engine", "")),
        (
            {},
            ("python", "-m", "sglang.launch_server", "--port", "1"),
            ProcessIdentity(None, None, "engine", ""),
        ),
        ({}, ("VLLM::EngineCore",), ProcessIdentity(None, None, "engine", "")),
        ({}, ("python", "/app/reward_server.py"), ProcessIdentity(None, None, "reward", "")),
        ({}, ("python", "serve_ref_model.py"), ProcessIdentity(None, None, "reference", "")),
        ({}, ("ray::RewardWorker.score",), ProcessIdentity(None, None, "reward", "")),
    ],
)
def test_claim_is_read_from_environment_and_command(environment, command, expected):
    assert identify(environment, command) == expected
