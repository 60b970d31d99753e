"""Ranks, children, servers and absent ranks in process tables, and the rank that one claims."""

import os

import pytest

from hangdoctor.collect.discover import ProcessIdentity, Search, find_job, identify
from hangdoctor.collect.process import Process
from hangdoctor.errors import NoRanksFound

OURS = os.getuid()


def process(
    pid, parent, command="python train.py", environment=None, executable="/usr/bin/python3.11", uid=OURS
):
    return Process(pid, parent, "S", uid, tuple(command.split()), executable, environment)


def rank(number, world_size, port="29500", **more):
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "h",
        "MASTER_PORT": port,
        **more,
    }


def table(*processes):
    return {process.pid: process for process in processes}


LAUNCHER = process(10, 1, "python -m torch.distributed.run train.py", {})
TORCHRUN = (
    LAUNCHER,
    process(12, 10, environment=rank(1, 3)),
    process(11, 10, environment=rank(0, 3)),
    process(13, 11, environment=rank(0, 3)),
    process(14, 11, "sleep 9", rank(0, 3), "/usr/bin/sleep"),
    process(15, 13, environment=rank(0, 3)),
)


@pytest.mark.parametrize(
    "search", [Search(pids=(10,)), Search(pids=(12,)), Search(match=r"train\.py"), Search()]
)
def test_ranks_are_distinguished_from_children_that_inherit_their_environment(search):
    job = find_job(search, table(*TORCHRUN, process(99, 1, "python other.py", {})))
    assert [(target.name, target.pid, target.parent) for target in job.targets] == [
        ("rank_0", 11, None),
        ("rank_1", 12, None),
        ("rank_0_child_0", 13, "rank_0"),
        ("rank_0_child_1", 14, "rank_0"),
        ("rank_0_child_2", 15, "rank_0"),
        ("launcher", 10, None),
    ]
    assert job.world_size == 3
    assert (job.gone, job.elsewhere) == ((2,), ())


def test_ranks_of_another_host_are_elsewhere_rather_than_gone():
    here = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    job = find_job(Search(), table(process(11, 1, environment=rank(2, 4, LOCAL_RANK="0", **here))))
    assert (job.gone, job.elsewhere) == ((3,), (0, 1))


def test_servers_without_a_rank_are_counted_by_role():
    job = find_job(
        Search(pids=(10,)),
        table(
            process(10, 1, "python launch.py", {}),
            process(11, 10, environment=rank(0, 1)),
            process(12, 10, "python -m sglang.launch_server", {}),
            process(13, 12, "sglang::scheduler_TP0", {}),
            process(14, 10, "python reward_server.py", {}),
        ),
    )
    assert [(target.name, target.pid, target.role) for target in job.targets] == [
        ("rank_0", 11, "trainer"),
        ("engine_rank_0", 12, "engine"),
        ("reward_rank_0", 14, "reward"),
        ("engine_rank_0_child_0", 13, "child"),
    ]


@pytest.mark.parametrize("search", [Search(), Search(pids=(10,)), Search(match="torch")])
def test_a_launcher_without_ranks_is_starting_and_no_rank(search):
    with pytest.raises(NoRanksFound, match=r"job is starting: the launcher with pid 10 .*hang --pid 10"):
        find_job(search, table(LAUNCHER, process(11, 10, "sh -c train", {}, "/bin/sh")))


def test_a_process_above_this_command_is_no_rank():
    above = table(process(1, 0, "python init.py", {}), process(os.getpid(), 1, "python -m areal_debug", {}))
    with pytest.raises(NoRanksFound, match=r"at or below pid 1\b"):
        find_job(Search(pids=(1,)), above)


def test_actors_of_ray_without_a_rank_are_numbered_beside_engines_and_their_driver():
    actors = {
        50: "TaskRunner.run",
        51: "WorkerDict.update",
        52: "LLMRayActor.generate",
        53: "WorkerDict.update",
    }
    processes = [process(pid, 9, f"ray::{title}", {}) for pid, title in actors.items()]
    job = find_job(Search(match=r"^ray::"), table(process(9, 1, "raylet", {}, "/usr/bin/raylet"), *processes))
    assert {target.name: target.pid for target in job.targets} == {
        "rank_0": 51,
        "rank_1": 53,
        "proxy_rank_0": 50,
        "engine_rank_0": 52,
    }


CLAIMS = {
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
        (CLAIMS, ("python", "train.py"), ProcessIdentity(9, 16, "trainer", "node-0:29500")),
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
