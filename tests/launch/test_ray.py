"""The Ray launcher, on a small separate cluster: environment of ranks, exit codes, cleanup."""

import json
import os
import re
import signal
import subprocess
import textwrap
import warnings
from pathlib import Path

import psutil
import pytest

from areal_core.config import PPOConfig
from areal_core.config.allocation import parse_allocation
from areal_core.errors import ConfigError
from areal_core.launch.job import Job
from areal_core.launch.run import launch
from tests.launch.conftest import TINY, TRAIN, overrides

ROOT = Path(__file__).parents[2]
FIRST = "rank 1 failed first, with exit code {}; the last lines of its standard error:\n    no such weights"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A Ray cluster with two CPUs, to which this process is connected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray = pytest.importorskip("ray")
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def of_cluster(files: Path, model: Path, cluster: str) -> list[str]:
    return overrides(files, model, "ray", total_train_steps=2, **{"launcher.ray.address": cluster})


def job(tmp_path, body: str, allocation: str = "embedded|fsdp:d2", cpus: int = 1) -> Job:
    config = PPOConfig(experiment_name="e", trial_name="t", device="cpu")
    config.scheduler.type = "ray"
    config.launcher.trainer_cpus_per_gpu, config.launcher.trainer_mem_per_gpu = cpus, 0
    config.launcher.inference_server_cpus_per_gpu, config.launcher.inference_server_mem_per_gpu = 1, 0
    config.launcher.ray.placement_timeout_s = 1.0
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(body))
    argv = (str(script), str(tmp_path))
    return Job(argv, config, parse_allocation(allocation), {"MARK": "ours"}, tmp_path / "logs")


@pytest.mark.long
def test_ranks_run_on_the_cluster_and_their_output_is_printed_here(cluster, tmp_path, capfd):
    body = """
    import json, os, sys
    keep = ("RANK", "WORLD_SIZE", "MARK", "OMP_NUM_THREADS")
    with open(f"{sys.argv[1]}/rank{os.environ['RANK']}.json", "w") as file:
        json.dump({name: os.environ[name] for name in keep} | {"folder": os.getcwd()}, file)
    print("hello from a rank")
    """
    assert launch(job(tmp_path, body)) == 0
    ranks = [json.loads((tmp_path / f"rank{i}.json").read_text()) for i in (0, 1)]
    common = {"WORLD_SIZE": "2", "MARK": "ours", "OMP_NUM_THREADS": "1", "folder": os.getcwd()}
    assert ranks == [{"RANK": "0", **common}, {"RANK": "1", **common}]
    assert (tmp_path / "logs" / "trainer.log").read_text().count("hello from a rank") == 2
    assert capfd.readouterr().out.count("hello from a rank") == 2


def test_the_spec_of_each_role_decides_its_resources(tmp_path):
    pytest.importorskip("ray")
    from areal_core.launch.job import spec_of
    from areal_core.launch.placement import place
    from areal_core.launch.ray_cluster import make_bundles

    made = job(tmp_path, "", "sglang:d1t2+fsdp:d2")
    made.config.actor.scheduling_spec = {"cpu": 3, "mem": 1}
    made.config.rollout.scheduling_spec = {"cpu": 0, "mem": 2}
    specs = [spec_of(made.config, role) for role in ("actor", "rollout")]
    assert make_bundles(*specs, place(made), "cuda") == [
        {"CPU": 6.0, "GPU": 2.0, "memory": 2.0 * 2**30},
        {"GPU": 2.0, "memory": 4.0 * 2**30},
    ]


@pytest.mark.long
def test_the_rank_that_fails_first_gives_code_and_error_and_the_other_is_ended(cluster, tmp_path, capfd):
    body = """
    import os, pathlib, sys, time
    if os.environ["RANK"] == "0":
        pathlib.Path(sys.argv[1], f"{os.getpid()}.pid").touch()
        time.sleep(60)
    while not list(pathlib.Path(sys.argv[1]).glob("*.pid")):
        time.sleep(0.01)
    print("no such weights", file=sys.stderr)
    sys.exit(7)
    """
    assert launch(job(tmp_path, body)) == 7
    printed = capfd.readouterr().out
    assert FIRST.format(7) in printed
    [waiting] = tmp_path.glob("*.pid")
    assert not psutil.pid_exists(int(waiting.stem))


@pytest.mark.long
def test_each_machine_has_an_agent_and_the_earliest_failure_counts(cluster, tmp_path, capfd):
    """Two machines with one rank each; in this test both are this machine."""
    body = """
    import os, pathlib, psutil, sys, time
    print("rank", *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")), flush=True)
    name = pathlib.Path(sys.argv[1], "rank_1")
    if os.environ["RANK"] == "1":
        name.with_suffix(".new").write_text(str(os.getpid()))
        name.with_suffix(".new").rename(name)
    while os.environ["RANK"] == "0" and not (name.exists() and not psutil.pid_exists(int(name.read_text()))):
        time.sleep(0.01)
    print("no such weights", file=sys.stderr)
    sys.exit(7 - int(os.environ["RANK"]))
    """
    started = job(tmp_path, body)
    started.config.cluster.n_gpus_per_node = 1
    assert launch(started) == 6
    printed = capfd.readouterr().out
    assert "rank 0 2 0 0\n" in printed
    assert "rank 1 2 0 1\n" in printed
    assert FIRST.format(6) in printed


@pytest.mark.long
def test_servers_run_on_the_cluster_and_ranks_get_their_addresses(cluster, stop_file, tmp_path, capfd):
    body = f"""
    import os, pathlib, time
    print("servers", os.environ["AREAL_LLM_SERVER_ADDRS"], os.environ["NCCL_CUMEM_ENABLE"])
    pathlib.Path({str(stop_file) + "1"!r}).touch()
    time.sleep(5)  # in which the server ends, and the launcher is told
    """
    started = job(tmp_path, body, "sglang:d1+fsdp:d1")
    started.config.launcher.inference_server_env_vars = "SAID=by-the-config"
    started.config.sglang.model_path = "some/model"
    assert launch(started) == 0
    printed = capfd.readouterr()
    [address] = re.findall(r"^inference servers: (\S+)$", printed.out, re.MULTILINE)
    assert f"servers {address} 0" in printed.out
    assert f"ended with exit code 1: server {address}; the last lines of" in printed.err
    assert "the scheduler died" in printed.err
    assert (tmp_path / "logs" / "llm_server_0.log").read_text().startswith("model some/model\n")


@pytest.mark.long
def test_a_server_that_cannot_start_is_reported_with_its_last_line(cluster, stop_file, tmp_path, capfd):
    Path(f"{stop_file}1").touch()
    started = job(tmp_path, "raise SystemExit(5)", "sglang:d1+fsdp:d1")
    assert launch(started) == 1
    assert "no such model" in capfd.readouterr().err
    assert not (tmp_path / "logs" / "trainer.log").exists()


@pytest.mark.long
def test_a_run_that_does_not_fit_is_refused_with_requested_and_available_resources(cluster, tmp_path):
    with pytest.raises(ConfigError, match=r"Ray did not provide 8 CPU within 1 s .* it has 2 CPU, .* in all"):
        launch(job(tmp_path, "", cpus=4))


@pytest.mark.long
def test_the_end_of_the_launcher_ends_the_ranks_and_releases_the_machines(cluster, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, time; print('started', os.getpid(), flush=True); time.sleep(600)")
    with subprocess.Popen(
        [*TRAIN, script, "--config", TINY, *of_cluster(tmp_path, tmp_path, cluster)],
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        pid = next(line.split()[1] for line in launcher.stdout if line.startswith("started "))
        launcher.send_signal(signal.SIGTERM)
        launcher.stdout.read()
    assert launcher.returncode == 128 + signal.SIGTERM
    assert not psutil.pid_exists(int(pid))


@pytest.mark.long
def test_reinforcement_learning_runs_under_ray(cluster, tiny_model, tmp_path):
    script = ROOT / "tests" / "debug" / "train_tiny.py"
    command = [*TRAIN, script, "--config", TINY, *of_cluster(tmp_path, tiny_model, cluster)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1 (2 of 2)" in done.stdout
    [stats] = tmp_path.glob("logs/*/tiny/test/stats.jsonl")
    assert [json.loads(line)["step"] for line in stats.read_text().splitlines()] == [0, 1]
