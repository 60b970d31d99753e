"""Collect one real host: small processes that claim ranks, and the resulting folder."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hangdoctor.collect.discover import Search
from hangdoctor.collect.host import collect_host
from hangdoctor.collect.pyspy import Options
from hangdoctor.collect.write import read_manifest, unpack
from tests.command_line import invoke

QUICK = Options(interval_s=0.2, timeout_s=20, host="here")
RANK = """
import os, sys, time
def wait_for_peers():
    if os.environ["RANK"] == "0" and os.fork() == 0:
        load_data()
    print("step 41", "step 42", sep="\\n", flush=True)
    open(sys.argv[1] + "/ready-" + os.environ["RANK"], "w").close()
    time.sleep(600)
def load_data():
    open(sys.argv[1] + "/ready-child", "w").close()
    time.sleep(600)
wait_for_peers()
"""


@pytest.fixture
def job(tmp_path):
    """Two ranks of three, rank 0 with a child, in the environment that torchrun gives."""
    program = tmp_path / "train.py"
    program.write_text(RANK)
    attempt = tmp_path / "attempt_0"
    for local in ("0", "2"):
        (attempt / local).mkdir(parents=True)
    (attempt / "2/error.json").write_text('{"message": "out of memory"}')
    ranks = []
    for rank in (0, 1):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(os.getpid()),
            "NCCL_DEBUG": "INFO",
            "NCCL_AUTH_TOKEN": "do not tell",
            "WANDB_API_KEY": "do not tell",
            "TORCHELASTIC_ERROR_FILE": str(attempt / str(rank) / "error.json"),
            "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "fr_"),
            "TORCH_FR_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe_"),
        }
        with (tmp_path / f"{rank}.log").open("w") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(program), str(tmp_path)],
                    env=environment,
                    stdout=log,
                    start_new_session=True,
                )
            )
    while len(list(tmp_path.glob("ready-*"))) < 3:
        assert [rank.poll() for rank in ranks] == [None, None]
        time.sleep(0.02)
    yield ranks
    for rank in ranks:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


def search_for(job):
    return Search(pids=(job[0].pid, job[1].pid))


def statuses(folder):
    return {process.name: process.status for process in read_manifest(folder).processes}


def test_every_process_is_dumped_every_rank_has_a_status_and_what_lies_around_is_kept(job, tmp_path):
    manifest = collect_host(search_for(job), tmp_path / "out", QUICK)
    assert manifest == read_manifest(tmp_path / "out")
    assert statuses(tmp_path / "out") == {
        "rank_0": "dumped",
        "rank_1": "dumped",
        "rank_0_child_0": "dumped",
        "rank_2": "gone",
    }
    for sample in (0, 1):
        for name, function in (("rank_1", "wait_for_peers"), ("rank_0_child_0", "load_data")):
            [thread] = json.loads((tmp_path / f"out/samples/{sample}/{name}.json").read_text())
            assert thread["frames"][0]["name"] == function
    facts = json.loads((tmp_path / "out/proc/1/rank_0_child_0.json").read_text())
    assert (facts["state"], facts["parent_pid"]) == ("S", job[0].pid)
    assert abs(facts["start_time"] - time.time()) < 120
    out = tmp_path / "out"
    assert (out / "logs/rank_1.log").read_text() == "step 41\nstep 42\n"
    assert json.loads((out / "errors/rank_2.json").read_text()) == {"message": "out of memory"}
    environment = json.loads((out / "env/rank_1.json").read_text())
    assert (environment["RANK"], environment["NCCL_DEBUG"]) == ("1", "INFO")
    assert not any("do not tell" in path.read_text() for path in out.rglob("*.json"))
    source = json.loads((out / "source/rank_1.json").read_text())
    assert source[f"{tmp_path}/train.py:8"] == "time.sleep(600)"


def test_flight_recorder_dump_is_requested_through_its_pipe(job, tmp_path):
    pipe = tmp_path / "pipe_1.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def answer():
        while not os.read(reader, 10):
            time.sleep(0.01)
        (tmp_path / "fr_1").write_bytes(b"a new dump")

    (tmp_path / "fr_1").write_bytes(b"an old dump")
    os.utime(tmp_path / "fr_1", (0, 0))
    rank = threading.Thread(target=answer)
    rank.start()
    collect_host(search_for(job), tmp_path / "out", QUICK)
    rank.join()
    os.close(reader)
    assert (tmp_path / "out/fr/rank_1.pickle").read_bytes() == b"a new dump"
    assert not (tmp_path / "out/fr/rank_0.pickle").exists()


def test_command_writes_a_tar_and_says_what_comes_next(job, tmp_path):
    tar = tmp_path / "out.tar.gz"
    arguments = ["--pid", str(job[0].pid), "--to", str(tar), "--interval", "0.1"]
    done = invoke("hang", "collect", *arguments)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "rank_2: gone: no process on this host claims this rank",
        f"2 of 3 ranks dumped into {tar}. Next: areal-debug hang diagnose {tar}",
    ]
    unpack(tar.read_bytes(), tmp_path / "out")
    assert statuses(tmp_path / "out")["rank_0"] == "dumped"
    again = invoke("hang", "collect", *arguments)
    assert (again.exit_code, again.output) == (
        2,
        f"Error: {tar} exists already: give --force to replace it, or another path\n",
    )


SECRET = "S3CRET-of-the-job"
SAYS = """
import os, sys, time
print("connecting to https://me:hunter2-x@h/ with", os.environ["HF_TOKEN"], "--api-key k9-k9-k9k", flush=True)
open(os.environ["READY"], "w").close()
time.sleep(600)
"""


def test_a_collection_of_a_process_with_secrets_has_none(tmp_path):
    arguments = [
        f"stats_logger.wandb.wandb_api_key={SECRET}",
        *("--api-key", SECRET),
        f"--wandbkey={SECRET}",
        *("--header", f"Authorization: Bearer {SECRET}"),
        f"s3://KEY:{SECRET}@bucket/rows",
        f'{{"hf_token": "{SECRET}"}}',
        "gconfig.max_tokens=512",
    ]
    environment = os.environ | {"RANK": "0", "HF_TOKEN": SECRET, "READY": str(tmp_path / "ready")}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SAYS, *arguments], env=environment, stdout=log, start_new_session=True
        )
    try:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.02)
        to = ["--to", str(tmp_path / "collection"), "--pid", str(process.pid), "--samples", "1"]
        done = invoke("hang", "collect", *to)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert done.exit_code == 0, done.output
    files = [path for path in (tmp_path / "collection").rglob("*") if path.is_file()]
    texts = {path.name: path.read_text() for path in files}
    assert [
        name for name, text in texts.items() if "S3CRET" in text or "hunter2" in text or "k9-k9" in text
    ] == []
    manifest = read_manifest(tmp_path / "collection")
    command = manifest.processes[0].command
    assert command.endswith(
        "stats_logger.wandb.wandb_api_key=*** --api-key *** --wandbkey=*** --header Authorization: *** "
        's3://***@bucket/rows {"hf_token": "***"} gconfig.max_tokens=512'
    )
    assert texts["rank_0.log"] == "connecting to https://***@h/ with *** --api-key ***\n"
    assert f"look like credentials: {manifest.num_masked} values" in done.output
    assert manifest.num_masked >= 9
