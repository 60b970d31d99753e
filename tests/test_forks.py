"""Programs that tests run in forks behave as programs of a new interpreter."""

import os
import signal
import subprocess
import textwrap
import time

import pytest

from tests.forks import run_anew, run_forked

PROGRAM = """
import os, sys
if __name__ == "__main__":
    print(sys.argv[1:], os.environ["COLOUR"], os.getcwd(), sys.path[0], "PATH" in os.environ, sys.stdin.read())
    print("wrong", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
"""
RANK = """
import os, pathlib, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.getppid() == int(os.environ["AGENT"]), flush=True)
sys.exit(3 if os.environ["RANK"] == sys.argv[1] else 0)
"""


@pytest.fixture
def program(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / "program.py").write_text(textwrap.dedent(text))
        return "folder/program.py"

    return write


def test_a_fork_has_the_arguments_variables_folder_streams_and_exit_code_of_a_program(program, tmp_path):
    argv, variables = [program(PROGRAM), "5", "x"], {"COLOUR": "red"}
    forked = run_forked(argv, variables, tmp_path)
    anew = run_anew(argv, variables, tmp_path)
    assert (forked.returncode, forked.stdout, forked.stderr) == (5, anew.stdout, "wrong\n")
    assert forked.stdout == f"['5', 'x'] red {tmp_path} {tmp_path}/folder False \n"
    assert run_forked(argv, variables, tmp_path, typed="typed").stdout.endswith(" typed\n")


def test_a_fork_has_imported_torch_and_a_second_one_starts_as_the_first(program, tmp_path):
    file = program("import sys, torch; print('torch' in dir(sys)); sys.torch = torch; torch.ones(1).sum()")
    assert run_forked([file], place=tmp_path).stdout == run_forked([file], place=tmp_path).stdout == "False\n"


def test_a_fork_that_takes_too_long_is_ended(program, tmp_path):
    file = program("import os, time; print(os.getpid(), file=open('pid', 'w')); time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        run_forked([file], place=tmp_path, timeout_s=1)
    while os.path.exists(f"/proc/{int((tmp_path / 'pid').read_text())}"):
        time.sleep(0.01)


def test_a_signal_is_an_exit_code(program, tmp_path):
    file = program("import os; os.kill(os.getpid(), 9)")
    assert run_forked([file], place=tmp_path).returncode == -signal.SIGKILL


def test_ranks_of_torchrun_are_forks_of_it_and_their_failure_is_its_own(program, tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program(RANK)]
    agent = f"import os, runpy, sys; os.environ['AGENT'] = str(os.getpid()); sys.argv = {launch[1:]!r} + sys.argv[1:]"
    (tmp_path / "agent.py").write_text(f"{agent}\nrunpy.run_module(sys.argv[0], run_name='__main__')")
    good = run_forked(["agent.py", "2"], place=tmp_path)
    assert good.returncode == 0, good.stderr
    assert sorted(good.stdout.splitlines()) == [f"rank {rank} of 2 True" for rank in (0, 1)]
    bad = run_forked(["agent.py", "1"], place=tmp_path)
    assert bad.returncode == 1
    assert "exitcode  : 3" in bad.stderr
