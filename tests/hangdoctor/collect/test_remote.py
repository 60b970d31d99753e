"""Many hosts in one folder, with stand-ins for ssh and kubectl that run the collector here."""

import io
import os
import subprocess
import sys
import tarfile

import pytest

from hangdoctor.collect.discover import Search
from hangdoctor.collect.pyspy import Options
from hangdoctor.collect.remote import (
    Answer,
    build_bundle,
    collect_hosts,
    merge_answers,
    slurm_command,
    ssh_command,
)
from hangdoctor.collect.write import read_manifest
from hangdoctor.errors import HostsUnknown
from tests.command_line import invoke

from .sleeper import sleeping

SSH = """#!/bin/sh
# ssh -o BatchMode=yes -o ConnectTimeout=10 -- HOST COMMAND: `down` does not answer, other hosts
# are this machine.
[ "$6" = down ] && { echo "ssh: connect to host down port 22: No route to host" >&2; exit 255; }
[ "$6" = closed ] && { echo "me@closed: Permission denied (publickey)." >&2; exit 255; }
exec sh -c "$7"
"""
KUBECTL = """#!/bin/sh
echo "$@" | cut -c -70 >>"$0.calls"
if [ "$1" = get ]; then echo pod/trainer-0; exit 0; fi
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


@pytest.fixture
def rank(tmp_path):
    """Start a process that claims to be rank 0 of 2; return the folder that comes first on PATH."""
    code = "import time; print(flush=True); time.sleep(600)"
    variables = {"RANK": "0", "WORLD_SIZE": "2", "SLURM_NNODES": "2", "MASTER_PORT": "1"}
    with sleeping(code, f"named {tmp_path}", **variables) as process:
        yield process


def put_on_path(tmp_path, monkeypatch, name, text):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / name


def run_collect(tmp_path, *arguments):
    search = ["--match", f"named {tmp_path}", "--samples", "1", "--python", sys.executable]
    return invoke("hang", "collect", "--to", tmp_path / "out", *search, *arguments)


def test_ssh_hosts_stream_into_one_folder_and_each_has_a_status(rank, tmp_path, monkeypatch):
    put_on_path(tmp_path, monkeypatch, "ssh", SSH)
    done = run_collect(tmp_path, "--ssh", "node-1, down,closed")
    assert done.exit_code == 0, done.output
    manifest = read_manifest(tmp_path / "out")
    assert [(host.host, host.status, host.detail) for host in manifest.hosts] == [
        ("node-1", "ok", ""),
        ("down", "unreachable", "ssh: connect to host down port 22: No route to host"),
        ("closed", "not_permitted", "me@closed: Permission denied (publickey)."),
    ]
    assert [(p.name, p.host, p.pid, p.status) for p in manifest.processes] == [
        ("rank_0", "node-1", rank.pid, "dumped")
    ]
    assert (manifest.job_size, manifest.elsewhere) == (2, (1,))
    assert "host down: unreachable" in done.output
    assert (tmp_path / "out/samples/0/rank_0.json").exists()
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith("hangdoctor-")]


def test_the_bundle_needs_nothing_of_the_host(tmp_path):
    with tarfile.open(fileobj=io.BytesIO(build_bundle())) as tar:
        tar.extractall(tmp_path, filter="data")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import hangdoctor.collect.__main__"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, cwd=tmp_path)


def test_kubernetes_commands_are_printed_and_run(rank, tmp_path, monkeypatch):
    kubectl = put_on_path(tmp_path, monkeypatch, "kubectl", KUBECTL)
    done = run_collect(tmp_path, "--k8s", "job=train", "--namespace", "rl")
    assert done.exit_code == 0, done.output
    command = f"kubectl exec --stdin trainer-0 --namespace=rl -- {sys.executable} -c COLLECTOR --match=named"
    assert command in done.stderr
    calls = (kubectl.parent / "kubectl.calls").read_text().splitlines()
    assert calls[0] == "get pods --selector=job=train --field-selector=status.phase=Running --"
    assert [p.host for p in read_manifest(tmp_path / "out").processes if p.pid] == ["trainer-0"]


def test_host_that_does_not_answer_in_time_is_named(tmp_path):
    with pytest.raises(ValueError, match="slow: timed_out: no answer in 5 s"):
        merge_answers([Answer("slow", None, b"", "no answer in 5 s")], tmp_path, all_queried=True)


def test_srun_shares_the_job_and_takes_no_gpu_from_it():
    command = slurm_command("42", "node-7", ["python3", "-c", "x"])
    assert command[:7] == [
        *("srun", "--overlap", "--jobid=42", "--nodelist=node-7", "--nodes=1", "--ntasks=1", "--gres=none")
    ]


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "--", "", "a b", "a\x1b[2J"])
def test_a_host_that_ssh_would_take_for_an_option_is_refused(host, tmp_path):
    command = ssh_command("node-1", ["python3", "-c", "x"])
    assert command[-3:] == ["--", "node-1", "python3 -c x"]
    with pytest.raises(HostsUnknown, match="is not valid: give names or addresses of hosts"):
        collect_hosts([host], ssh_command, Search(), tmp_path, Options(), "python3", all_queried=False)
