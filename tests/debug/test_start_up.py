"""What verbs and replays import, and when."""

import json
import os
import subprocess
import sys

import pytest

from areal_core.launch.warm import LIBRARIES
from areal_debug.replay.ranks import MODULES
from areal_debug.verbs.check import MODULES as OF_PREFLIGHT

# Slow to import, and of no use to a run that reads its batches from a record.
UNUSED = ["deepdiff", "pandas", "pyarrow", "datasets", "sglang", "vllm", "ray", "wandb", "zarr", "duckdb"]
UNUSED += ["peft", "trl", "matplotlib", "math_verify", "torch.distributed.checkpoint"]


def loaded_after(modules: tuple[str, ...], then: tuple[str, ...]) -> tuple[set[str], int]:
    """Return the modules that a new process has after importing some, and its number of threads
    after it has imported others, too.
    """
    code = f"""
import importlib, json, os, sys
for name in {modules!r}:
    importlib.import_module(name)
loaded = sorted(sys.modules)
for name in {then!r}:
    importlib.import_module(name)
print(json.dumps([loaded, len(os.listdir("/proc/self/task"))]))
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, check=True)
    names, num_threads = json.loads(done.stdout)
    return set(names), num_threads


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_replays_import_is_what_they_use_and_starts_no_thread():
    """A fork has only the thread that forks: others would leave locks that nobody releases."""
    loaded, num_threads = loaded_after((*MODULES, *OF_PREFLIGHT), LIBRARIES)
    assert {"torch", "areal_core.trainer.rl", "areal_debug.replay.observer"} <= loaded
    assert sorted(loaded & set(UNUSED)) == []
    assert num_threads == 1


@pytest.mark.parametrize(
    "lines",
    [
        ("replay", "check run --config", "why"),
        pytest.param(("goto", "why --commits v1..HEAD"), marks=pytest.mark.long),
    ],
)
def test_a_command_checks_its_input_without_torch(lines, tmp_path):
    """The process that was called prints within a second; another one imports torch meanwhile."""
    code = """
import json, os, sys
from areal_debug.cli import main
for words in json.loads(sys.argv[1]):
    if os.fork() == 0:
        try:
            main(words, prog_name="areal-debug")
        except SystemExit as end:  # without the end of an interpreter, which takes longer than the verb
            print([name for name in ("torch", "transformers", "pandas", "pyarrow") if name in sys.modules])
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
    commands = json.dumps([[*line.split(), str(tmp_path / "missing")] for line in lines])
    done = subprocess.run([sys.executable, "-c", code, commands], capture_output=True, text=True)
    assert done.stdout.split() == ["[]", "2"] * len(lines)
    assert done.stderr.count("Error: ") == len(lines)
