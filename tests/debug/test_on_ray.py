"""`--on ray` with a real Ray: reports equal to those of the same command here, and dead workers."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from areal_core.launch.ray_cluster import connected
from areal_debug.cli import main
from areal_debug.spread.on_ray import check_nodes, run_on_ray
from areal_debug.spread.tasks import Task

pytestmark = pytest.mark.long
AREAL_DEBUG = Path(sys.executable).parent / "areal-debug"


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster with two CPUs, to which this process is connected."""
    with connected("local", num_cpus=2):
        import ray

        yield ray.get_runtime_context().gcs_address


def run(*arguments):
    done = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout)


def equal_on_ray(*arguments):
    """Run a command here and on Ray; return its code and facts, which must be equal."""
    here, there = run(*arguments), run(*arguments, "--on", "ray")
    assert there == here
    return here


@pytest.fixture
def records(recorded, tmp_path):
    """Two copies of a record; the second is damaged."""
    folders = [Path(shutil.copytree(recorded, tmp_path / name / "record")) for name in "ab"]
    damaged = next((folders[1] / "steps/000001").glob("batch*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    return folders


def test_verify_is_equal(cluster, records):
    code, found = equal_on_ray("record", "verify", *records, records[0] / "nothing")
    assert code == 1
    assert [task["exit_code"] for task in found["tasks"]] == [0, 1, 2]


def test_archives_are_equal(cluster, recorded, tmp_path):
    other = shutil.copytree(recorded, tmp_path / "other")
    archived = {}
    for name, options in {"here": (), "ray": ("--on", "ray")}.items():
        code, archived[name] = run("record", "archive", recorded, other, "--to", tmp_path / name, *options)
        assert code == 0
        for task in archived[name]["tasks"]:
            del task["report"]["location"]
    assert archived["ray"] == archived["here"]
    files = [sorted(f for f in (tmp_path / name).rglob("*") if f.is_file()) for name in archived]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


def test_answers_are_equal(cluster, recorded, tmp_path):
    other = shutil.copytree(recorded, tmp_path / "other")
    sql = "select step, avg(reward) as reward, max(length(completion)) as longest from samples group by 1 order by 1"
    code, found = equal_on_ray("query", recorded, other, sql)
    assert (code, [len(task["report"]) for task in found["tasks"]]) == (0, [3, 3])


def test_crosschecks_are_equal(cluster, recorded):
    code, found = equal_on_ray("crosscheck", recorded, "--steps", ":")
    assert (code, [task["name"] for task in found["tasks"]]) == (0, ["step 0", "step 1", "step 2"])


def test_consistency_is_equal_with_replayed_weights(cluster, recorded):
    code, found = equal_on_ray("consistency", recorded, "--steps", "1:3", "--replay-weights")
    assert (code, [task["report"]["model"] for task in found["tasks"]]) == (
        0,
        ["replayed to step 1", "replayed to step 2"],
    )
    assert all(task["report"]["metrics"]["mean_abs"] < 1e-5 for task in found["tasks"])


def test_a_step_whose_weights_are_not_at_hand_is_named_and_the_others_are_checked(cluster, recorded):
    code, found = equal_on_ray("consistency", recorded, "--steps", "0:2")
    assert (code, [task["exit_code"] for task in found["tasks"]]) == (2, [0, 2])
    assert "give --replay-weights" in found["tasks"][1]["error"]


def test_sweeps_are_equal(cluster, recorded):
    sweep = ["--sweep", "actor.eps_clip=0.0001,0.2", "--to-step", 1]
    code, found = equal_on_ray("replay", recorded, *sweep)
    assert (code, [task["name"] for task in found["tasks"]]) == (
        0,
        ["actor.eps_clip=0.0001", "actor.eps_clip=0.2"],
    )
    assert found["tasks"][0]["report"]["set_differently"]["config"][0]["where"] == "actor.eps_clip"


def workers_of(pid):
    """The workers that run a task of this Ray."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if child.name().startswith("ray::run_there")]


def test_a_worker_that_is_killed_is_replaced_and_the_report_says_so(recorded, tmp_path):
    command = [AREAL_DEBUG, "crosscheck", recorded, "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    here = subprocess.run([*command, "--steps", ":"], capture_output=True, env=environment, check=True)
    with subprocess.Popen(
        [*command, "--on", "ray", "--workers", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as running:
        for _ in range(6000):
            if killed := workers_of(running.pid):
                killed[0].kill()
                break
            time.sleep(0.02)
        printed, _ = running.communicate(timeout=300)
    found = json.loads(printed)
    assert (running.returncode, list(found["retries"].values())) == (0, [1])
    assert found["tasks"] == json.loads(here.stdout)["tasks"]


def test_a_task_whose_worker_always_dies_is_inconclusive(cluster, recorded, monkeypatch):
    def die(*arguments):
        import os

        os.kill(os.getpid(), 9)

    monkeypatch.setattr("areal_debug.spread.on_ray.run_there", die)
    [found] = run_on_ray([Task("one", ("record", "verify", "--json", "--", str(recorded)))], 1, print)
    assert (found.exit_code, found.num_retries) == (2, 2)
    assert found.error == "its worker died 3 times (WorkerCrashedError)"


def test_a_task_that_no_node_has_the_cpus_for_is_refused(cluster):
    with pytest.raises(ValueError, match=r"a task needs 5 CPUs, one a rank, and the largest node .* has 2"):
        check_nodes(5)


def test_ray_of_the_address_is_used(cluster, recorded):
    environment = os.environ | {"RAY_ADDRESS": cluster}
    command = [AREAL_DEBUG, "record", "verify", recorded, "--on", "ray", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["intact"]
