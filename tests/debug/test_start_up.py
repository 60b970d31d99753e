"""What verbs import, when they say what they do, and where compiled files are kept."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_core.launch.warm import LIBRARIES
from areal_debug.replay.ranks import MODULES
from areal_debug.start_up import bytecode_variables
from areal_debug.verbs.check import MODULES as OF_PREFLIGHT

from .test_waiting import drawn, on_terminal, screen

# Slow to import, and of no use to a run that reads its batches from a record.
UNUSED = ["deepdiff", "pandas", "pyarrow", "datasets", "sglang", "vllm", "ray", "wandb", "zarr", "duckdb"]
UNUSED += ["peft", "trl", "matplotlib", "math_verify", "torch.distributed.checkpoint"]
# What a verb may import only once its first line is printed.
SLOW = ["torch", "transformers", "scipy", "sympy", "aiohttp", "jinja2", *UNUSED]

SCRIPT = str(Path(__file__).with_name("train_tiny.py"))
OPTIONS = ["--config", str(Path(__file__).with_name("tiny.yaml")), "actor.path=a", "cluster.fileroot=b"]


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_replays_import_is_what_they_use_and_starts_no_thread():
    """A fork has only the thread that forks: others would leave locks that nobody releases."""
    loaded, num_threads = loaded_after((*MODULES, *OF_PREFLIGHT), LIBRARIES)
    assert {"torch", "areal_core.trainer.rl", "areal_debug.replay.observer"} <= loaded
    assert sorted(loaded & set(UNUSED)) == []
    assert num_threads == 1


@pytest.mark.parametrize(
    "verb",
    [
        *("replay", "check run", "why"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("goto", "why --commits")),
    ],
)
def test_a_command_checks_its_input_without_torch(verb, tmp_path):
    """The process that was called prints within a second; another one imports torch meanwhile."""
    code = f"""
import sys
from areal_debug.cli import main
sys.argv = ["areal-debug", *{verb.split()!r}, *sys.argv[1:]]
try:
    main()
finally:
    print([name for name in ("torch", "transformers", "pandas", "pyarrow") if name in sys.modules])
"""
    missing = str(tmp_path / "missing")
    given = {"why --commits": ["v1..HEAD", missing], "check run": ["--config", missing]}
    arguments = given.get(verb, [missing])
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "[]\n")
    assert "Error: " in done.stderr


@pytest.mark.long
def test_replay_says_what_it_does_while_torch_is_imported(recorded):
    command = [sys.executable, "-m", "areal_debug", "replay", str(recorded), "--to-step", "0"]
    code, written = on_terminal(command, columns=200)
    assert code == 0, written
    before, _, after = written.partition("step    0")
    assert "replaying steps 0 to 0 of " in drawn(before)[-1]
    assert "replaying" not in "".join(screen(written))
    assert "Bit-identical" in after


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["replay", "RECORD"], "replaying steps 0 to 2 of RECORD on 1 rank"),
        pytest.param(
            ["replay", "RECORD", "--explain", "1"], "explaining step 1 of RECORD", marks=pytest.mark.long
        ),
        pytest.param(
            ["goto", "RECORD", "--step", "1"],
            "going to step 1 of RECORD on 1 rank",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["why", "RECORD", "--commits", "v1..HEAD"],
            "searching v1..HEAD for the commit that changed the numbers of RECORD",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["check", "run", "--config", "a.yaml"],
            "preflight of a.yaml: reading settings and source files",
            marks=pytest.mark.long,
        ),
        (["consistency", "RECORD", "--model", "a"], "scoring 1 step of RECORD with a"),
        pytest.param(
            ["consistency", "--engine", "a", "--model", "b", "--prompts", "c"],
            "sampling from 1 engine, and scoring with b",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["crosscheck", "RECORD"], "recomputing the first step of RECORD", marks=pytest.mark.long
        ),
        (["record", "cut", "RECORD", "--step", "1", "--to", "a.zip"], "cutting step 1 of RECORD"),
        (["check", "model", "a"], "checking a as d1"),
        (["train", SCRIPT, *OPTIONS], f"starting {SCRIPT} with embedded|fsdp:d1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_verb_prints_its_first_line_before_it_imports_what_is_slow(arguments, line, recorded):
    code = f"""
import sys
import areal_debug.render
def stop(text):
    print(text)
    print([name for name in {SLOW!r} if name in sys.modules])
    raise SystemExit
areal_debug.render.announce = stop
from areal_debug.cli import main
main()
"""
    given = [argument.replace("RECORD", str(recorded)) for argument in arguments]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True)
    assert done.stdout.splitlines() == [line.replace("RECORD", str(recorded)), "[]"], done.stderr


@pytest.mark.long
def test_no_process_of_a_replay_imports_what_it_does_not_use(recorded):
    command = [sys.executable, "-m", "areal_debug", "replay", str(recorded), "--to-step", "0"]
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}  # each process lists what it imports
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rsplit("|")[-1].strip() for line in lines}
    assert "torch" in imported
    compares_configs = {"deepdiff", "pandas", "pyarrow"}  # deepdiff imports the others
    assert sorted(imported & set(UNUSED) - compares_configs) == []


@pytest.fixture
def never_written(monkeypatch, tmp_path):
    """A torch without compiled files, and a Python that may not write them."""
    package = tmp_path / "torch.py"
    package.touch()
    spec = importlib.util.spec_from_file_location("torch", package)
    monkeypatch.setattr("areal_debug.start_up.find_spec", lambda name: spec)
    monkeypatch.setattr("areal_debug.start_up.default_root", lambda: str(tmp_path / "mine"))
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return package


def test_compiled_files_are_kept_in_a_private_folder_where_python_may_not_write(never_written, tmp_path):
    folder = tmp_path / "mine" / "bytecode"
    assert bytecode_variables() == {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]


def test_compiled_files_stay_where_they_are_if_there_are_some_or_the_user_chose(never_written, monkeypatch):
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "/a")
    assert bytecode_variables() == {}
    monkeypatch.delenv("PYTHONPYCACHEPREFIX")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert bytecode_variables() == {}
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    compiled = importlib.util.cache_from_source(str(never_written))
    os.makedirs(os.path.dirname(compiled))
    open(compiled, "w").close()
    assert bytecode_variables() == {}
