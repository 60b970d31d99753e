"""A lightweight stand-in for SGLang, started by launchers as they start the real one."""

import sys
from pathlib import Path

import pytest

TRAIN = [Path(sys.executable).parent / "areal-debug", "train"]
TINY = Path(__file__).parents[1] / "debug" / "tiny.yaml"


def overrides(files: Path, model: Path | str, scheduler: str, **options: object) -> list[str]:
    """Return the options of a run of this scheduler on one CPU a rank."""
    given = {
        "cluster.fileroot": files,
        "actor.path": model,
        "scheduler.type": scheduler,
        "launcher.trainer_cpus_per_gpu": 1,
        "launcher.trainer_mem_per_gpu": 0,
    }
    return [f"{name}={value}" for name, value in (given | options).items()]


# Found as `sglang.launch_server` before the installed one. Ends when the file STOP_FILE + its seed
# appears.
FAKE_SGLANG = """
import os, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

stop = os.environ["STOP_FILE"] + option("--random-seed")
print("model", option("--model-path"), flush=True)
if os.path.exists(stop):
    sys.exit("no such model")
threading.Thread(target=HTTPServer((option("--host"), int(option("--port"))), Handler).serve_forever, daemon=True).start()
while not os.path.exists(stop):
    time.sleep(0.05)
sys.exit("the scheduler died")
"""


@pytest.fixture
def stop_file(tmp_path, monkeypatch) -> Path:
    """Put a stand-in for SGLang on the path; servers with seed n end when `stop{n}` appears."""
    (tmp_path / "fake" / "sglang").mkdir(parents=True)
    (tmp_path / "fake" / "sglang" / "__init__.py").touch()
    (tmp_path / "fake" / "sglang" / "launch_server.py").write_text(FAKE_SGLANG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("STOP_FILE", str(tmp_path / "stop"))
    return tmp_path / "stop"
