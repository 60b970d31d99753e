"""Ranks, children, servers and absent ranks, found in literal process tables."""

import os

import pytest

from hangdoctor.collect.discover import Search, find_job
from hangdoctor.collect.process import Process
from hangdoctor.errors import NoRanksFound, SeveralJobs

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


def test_scheduler_rank_of_the_launcher_gives_way_to_the_ranks_below_it():
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "5"}
    job = find_job(
        Search(variable=("SLURM_JOB_ID", "5")),
        table(process(10, 1, "python run.py", slurm), process(11, 10, environment=slurm | rank(0, 1))),
    )
    assert [(target.name, target.pid) for target in job.targets] == [("rank_0", 11)]


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


def test_several_jobs_are_listed_with_their_pids():
    two = table(process(11, 1, environment=rank(0, 1)), process(12, 1, environment=rank(0, 1, port="4000")))
    with pytest.raises(
        SeveralJobs, match=r"2 jobs run here(.|\n)*hang --pid 11 +# h:29500: 1 ranks(.|\n)*--pid 12 +# h:4000"
    ):
        find_job(Search(), two)
    assert [target.pid for target in find_job(Search(pids=(12,)), two).targets] == [12]


def test_nothing_found_says_what_was_looked_for():
    others = table(process(11, 1, "python x.py", None, uid=OURS + 1), process(12, 1, "bash", {}, "/bin/bash"))
    with pytest.raises(
        NoRanksFound, match=r"with RANK .* 2 processes .*1 of other users not readable.*--pid PID"
    ):
        find_job(Search(), others)
    with pytest.raises(NoRanksFound, match=r"command line that matches 'nowhere'"):
        find_job(Search(match="nowhere"), others)
    with pytest.raises(NoRanksFound, match="no process 4711 on this host"):
        find_job(Search(pids=(4711,)), others)


def test_the_collector_and_its_callers_are_never_ranks():
    ours = process(os.getpid(), 10, "python -m hangdoctor.collect", rank(0, 2))
    job = find_job(
        Search(), table(process(10, 1, environment=rank(7, 8)), ours, process(11, 1, environment=rank(0, 2)))
    )
    assert [target.pid for target in job.targets] == [11]


@pytest.mark.parametrize("search", [Search(), Search(pids=(10,)), Search(match="torch")])
def test_a_launcher_without_ranks_is_starting_and_no_rank(search):
    with pytest.raises(NoRanksFound, match=r"job is starting: the launcher with pid 10 .*hang --pid 10"):
        find_job(search, table(LAUNCHER, process(11, 10, "sh -c train", {}, "/bin/sh")))


def test_an_argument_makes_no_launcher():
    one = table(process(12, 1, "python -u train.py --launcher torchrun", rank(0, 1)))
    assert [target.name for target in find_job(Search(), one).targets] == ["rank_0"]


def test_a_process_above_this_command_is_no_rank():
    above = table(process(1, 0, "python init.py", {}), process(os.getpid(), 1, "python -m areal_debug", {}))
    with pytest.raises(NoRanksFound, match=r"at or below pid 1\b"):
        find_job(Search(pids=(1,)), above)
