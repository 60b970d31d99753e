"""Real processes: three ranks of a stand-in of torch and their engine, and twenty causes in 8 ranks."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hangdoctor.collect.discover import Search
from hangdoctor.collect.process import connected_ports, listening_ports
from hangdoctor.collect.pyspy import find_pyspy
from hangdoctor.slow.engines import find_engines, metrics_requests
from hangdoctor.slow.live import sentence_about
from hangdoctor.slow.sample import collects_garbage
from tests.command_line import invoke

NUM_RANKS = 3
ALL_REDUCE = """
def all_reduce(meeting):
    meeting.send(b"x")
    meeting.recv(1)
"""
RANK = """
import gc, os, socket, sys, time
from torch.distributed.distributed_c10d import all_reduce
slow, rank = sys.argv[2:] == ["slow"], int(os.environ["RANK"])
class Rows:
    def __getitem__(self, index):
        time.sleep(0.35 if slow and rank == 1 else 0.02)
def forward():
    time.sleep(0.1)
meeting = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while True:
    Rows()[0]
    forward()
    all_reduce(meeting)
"""


def meet(server):
    """Release the ranks whenever all have arrived, until they end."""
    ranks = [server.accept()[0] for _ in range(NUM_RANKS)]
    with suppress(OSError):  # a rank was killed
        while all(rank.recv(1) for rank in ranks):
            for rank in ranks:
                rank.send(b"x")
    for rank in ranks:
        rank.close()


@pytest.fixture
def job(tmp_path):
    """Start ranks whose all_reduce is at the path of torch's; return the pid of one of them."""
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (package / "distributed_c10d.py").write_text(ALL_REDUCE)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    program = tmp_path / "train.py"
    program.write_text(RANK)
    server = socket.create_server(("127.0.0.1", 0))
    ranks = []

    def start(*arguments):
        port = server.getsockname()[1]
        threading.Thread(target=meet, args=(server,), daemon=True).start()
        for rank in range(NUM_RANKS):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(NUM_RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": str(tmp_path),
            }
            program_of_rank = [sys.executable, str(program), str(port), *arguments]
            ranks.append(subprocess.Popen(program_of_rank, env=environment))
        time.sleep(1.0)
        return ranks[0].pid

    yield start
    for rank in ranks:
        rank.kill()
        rank.wait()
    server.close()


def test_the_slow_rank_of_a_running_job_is_named(job):
    pid = job("slow")
    done = invoke("hang", "--slow", "--pid", pid, "--seconds", "5", "--json")
    verdict = json.loads(done.output)
    assert (verdict["label"], verdict["cause"], verdict["culprit_ranks"]) == ("slow_rank", "input", [1])
    assert verdict["place"].startswith("__getitem__ (")
    assert verdict["place"].endswith("train.py:7)")
    assert done.exit_code == 1
    shares = verdict["ranks"][1]["shares"]
    assert shares["input"] > 0.5 > shares["forward"] > 0
    assert verdict["ranks"][0]["shares"]["collective"] > 0.4


@pytest.mark.long
def test_a_healthy_job_has_no_slow_rank_and_the_watch_says_nothing(job):
    pid = job()
    done = invoke("hang", "--slow", "--pid", pid, "--seconds", "4")
    assert done.output.startswith("no_rank_is_slow")
    assert "No rank is slow: all 3 wait" in done.output
    assert "Share of the time, in percent" in done.output
    assert done.exit_code == 0
    assert sentence_about(Search((pid,)), 1.0) is None


def test_garbage_collection_is_seen_in_native_stacks():
    code = "import gc\nclass A: pass\nkept = [A() for _ in range(200000)]\nprint(1, flush=True)\nwhile True: gc.collect()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        seen = [collects_garbage(process.pid, find_pyspy()) for _ in range(3)]
        process.kill()
    assert any(seen)


class Metrics(BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'# HELP x\nsglang:num_running_reqs{engine_type="unified",tp_rank="0"} 3.0\n'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_server_is_found_by_its_port_and_its_metrics_are_read():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_port
    assert port in listening_ports(os.getpid())
    with socket.create_connection(("127.0.0.1", port)):
        assert port in connected_ports(os.getpid())
    (engine,) = find_engines((), {port}, [os.getppid()])
    assert (engine.name, engine.pids[0]) == (f"engine on port {min(engine.ports)}", os.getpid())
    assert metrics_requests(engine) == 3
    assert find_engines((), {port}, [os.getpid()]) == []
    server.shutdown()
    server.server_close()


MOST_S = 30


@pytest.mark.long
def test_each_cause_is_named_and_no_healthy_job_is_accused(tmp_path):
    table = tmp_path / "table.json"
    done = subprocess.run([sys.executable, "-m", "benchmarks.slow_ranks", "--json", str(table)], check=False)
    results = json.loads(table.read_text())
    assert [result["summary"] for result in results if not result["right"]] == []
    assert [result["name"] for result in results if result["seconds"] > MOST_S] == []
    assert len([result for result in results if not result["name"].startswith("healthy")]) == 20
    assert done.returncode == 0
