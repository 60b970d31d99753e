"""One process that has imported libraries, shared by the commands of a user."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from areal_core.errors import ConfigError
from areal_core.launch import kept
from areal_core.launch.warm import warm_ranks
from areal_debug.info.machine import kept_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a kept process needs Linux")

# Prints its id, that of the process kept, and the value of the library.
PROGRAM = """
import os, sys, psutil
print(os.getpid(), psutil.Process().parent().ppid(), sys.modules["library"].VALUE)
"""


@pytest.fixture
def root(monkeypatch):
    """The folder of the user, with a short path: an address has at most 107 characters."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(kept, "default_root", lambda: f"{folder}/areal")
        yield Path(folder, "areal")


@pytest.fixture
def library(root, tmp_path, monkeypatch):
    """A library that the kept process imports; the process is ended afterwards."""
    (tmp_path / "packages").mkdir()
    file = tmp_path / "packages" / "library.py"
    file.write_text("VALUE = 1\n")
    os.utime(file, (1, 1))
    monkeypatch.setattr(kept, "LIBRARIES", ("library", "no_such_module"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}{os.pathsep}{Path(__file__).parents[2]}")
    monkeypatch.setenv(kept.VARIABLE, "5")
    yield file
    for process in psutil.process_iter(["cmdline"]):
        if any(str(root) in word and "idle_s" in word for word in process.info["cmdline"] or ()):
            process.kill()


@pytest.fixture
def run(library, tmp_path):
    """Run a program by a command of its own; return its exit code and its words."""

    def call(program: str = PROGRAM, num_ranks: int = 1, **fixed: str) -> tuple[int, list[str]]:
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(program))
        log = tmp_path / "ranks.log"
        with warm_ranks({"PYTHONHASHSEED": "7", **fixed}, ["colorsys"], path=(), kept=True) as ranks:
            code = ranks.run([str(file)], num_ranks, {}, log, echo=False)
        return code, log.read_text().split()

    return call


def addresses(root: Path) -> list[Path]:
    return list((root / "warm").glob("*.sock"))


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_commands_share_a_process_that_outlives_them_and_is_private(run, root):
    runs = [run() for _ in range(3)]
    assert [(code, words[2]) for code, words in runs] == [(0, "1")] * 3
    assert len({words[0] for _, words in runs}) == 3
    assert len({words[1] for _, words in runs}) == 1
    assert psutil.Process(int(runs[0][1][1])).ppid() != os.getpid()
    assert stat.S_IMODE((root / "warm").stat().st_mode) == 0o700


def test_a_command_that_inherits_something_else_gets_another_process(run, monkeypatch):
    first = run()[1][1]
    monkeypatch.setenv("TERM", "dumb")  # nothing that a library reads
    assert run()[1][1] == first
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    second = run()[1][1]
    third = run(OMP_NUM_THREADS="2")[1][1]
    assert len({first, second, third}) == 3


def test_a_program_has_environment_folder_and_umask_of_its_command(run, tmp_path, monkeypatch):
    program = """
    import os
    print(os.getcwd(), os.environ.get("AREAL_A"), os.environ["COLUMNS"], os.umask(0), hash("a"))
    """
    run()
    before = os.umask(0o027)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AREAL_A", "b")
    monkeypatch.setenv("COLUMNS", "77")
    seeded = os.environ | {"PYTHONHASHSEED": "7"}
    expected = subprocess.run(
        [sys.executable, "-c", "print(hash('a'))"], env=seeded, capture_output=True, text=True
    )
    found = run(program)
    os.umask(before)
    assert found == (0, [str(tmp_path), "b", "77", str(0o027), expected.stdout.strip()])


def test_a_changed_library_is_imported_again(run, library, root):
    first = run()[1]
    library.write_text("VALUE = 22\n")
    assert run("import library; print(library.VALUE)") == (0, ["22"])
    assert addresses(root) == []
    second = run()[1]
    assert second[1] != first[1]
    assert second[2] == "22"
    wait_until(lambda: not psutil.pid_exists(int(first[1])))


def test_a_process_that_nobody_uses_ends_and_leaves_no_address(run, root, monkeypatch):
    monkeypatch.setenv(kept.VARIABLE, "0.01")
    process = psutil.Process(int(run()[1][1]))
    wait_until(lambda: not process.is_running())
    assert addresses(root) == []


def test_a_process_that_was_killed_is_replaced(run):
    first = int(run()[1][1])
    os.kill(first, signal.SIGKILL)
    code, words = run()
    assert code == 0
    assert int(words[1]) != first


def test_ranks_end_when_the_command_is_killed(library, root, tmp_path):
    (tmp_path / "rank.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(100)")
    command = f"""
from pathlib import Path
from areal_core.launch import kept
from areal_core.launch.warm import warm_ranks
from areal_debug.info.machine import kept_processes
kept.LIBRARIES, kept.default_root = ("library",), lambda: {str(root)!r}
with warm_ranks({{}}, [], path=(), kept=True) as ranks:
    ranks.run([{str(tmp_path / "rank.py")!r}], 1, {{}}, Path({str(tmp_path / "log")!r}))
"""
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        rank = int(process.stdout.readline())
        server = psutil.Process(rank).parent()
        process.kill()
    assert server is not None
    wait_until(lambda: not psutil.pid_exists(rank) and not server.is_running())


def test_ctrl_c_and_a_terminal_are_those_of_attached_ranks(library, tmp_path, capfd):
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, signal, time\ntry:\n    os.kill({os.getpid()}, signal.SIGINT)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
    )
    with warm_ranks({}, [], attached=True, path=(), kept=True) as ranks:
        assert ranks.run_attached([str(program)], 1, {}) == 0
    assert capfd.readouterr().out == "interrupted\n"


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
def test_a_wrong_number_of_minutes_is_refused(library, monkeypatch, value):
    monkeypatch.setenv(kept.VARIABLE, value)
    with (
        pytest.raises(ConfigError, match=f"AREAL_DEBUG_WARM_MIN='{value}' must be a number of minutes"),
        warm_ranks({}, [], kept=True),
    ):
        pass


def test_nothing_is_kept_unless_it_is_wanted(library, root, monkeypatch, tmp_path):
    with warm_ranks({}, [], path=()) as ranks:
        assert ranks.run([str(library)], 1, {}, tmp_path / "log", echo=False) == 0
    monkeypatch.delenv(kept.VARIABLE)
    with warm_ranks({}, [], path=(), kept=True) as ranks:
        assert ranks.run([str(library)], 1, {}, tmp_path / "log", echo=False) == 0
    assert not root.exists()


def test_info_lists_the_process(run):
    process = psutil.Process(int(run()[1][1]))
    kept_bytes = kept_processes()[process.pid]
    assert kept_bytes == pytest.approx(process.memory_info().rss, rel=0.5)
    process.kill()
    wait_until(lambda: process.pid not in kept_processes())
