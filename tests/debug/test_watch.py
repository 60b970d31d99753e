"""`with areal_debug.watch():` in real torchrun ranks, plain ranks and this process; `train --watch`."""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import areal_debug
from areal_core.errors import NonFiniteError
from areal_core.safety.private import default_root
from areal_debug.verbs.train import without_watch
from areal_debug.watching import block
from hangdoctor.collect import pyspy
from hangdoctor.collect.discover import Search
from hangdoctor.collect.host import collect_host
from hangdoctor.collect.registered import read_registered
from hangdoctor.heartbeat import read_beats
from tests.forks import run_forked

ROOT = Path(__file__).parents[2]
TRAIN = """
import sys, threading
import torch, torch.distributed as dist
import areal_debug

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(w=None, nan_at=None, absent_at=None):
    for step in range(6):
        inputs = torch.ones(2, 4)
        if (rank, step) == (1, nan_at):
            inputs[0, 0] = torch.nan
        loss = model(inputs).square().mean()
        loss.backward()
        if (rank, step) == (1, absent_at):
            threading.Event().wait()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if w is not None:
            w.step(step, loss=loss, model=model)
        optimizer.zero_grad()
"""
GOOD = """
with areal_debug.watch(sys.argv[1]) as w:
    train(w)
with areal_debug.watch() as w:
    train()
    assert w.num_steps == 6
try:
    with areal_debug.watch():
        raise KeyError("passes through")
except KeyError as error:
    assert error.args == ("passes through",)
dist.destroy_process_group()
"""
BAD = """
with areal_debug.watch() as w:
    train(w, nan_at=2)
with areal_debug.watch(sys.argv[1], timeout_s=2, then="end", nonfinite=False) as w:
    train(w, absent_at=3)
"""
KILLED = """
import os, time
import areal_debug

with areal_debug.watch() as w:
    for step in range(4):
        w.step(step)
    time.sleep(1)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    time.sleep(60)
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Run jobs of two ranks at the same time; return the folder, status and errors of each."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def run(folder, program):
        (folder / "train.py").write_text(program)
        done = run_forked([*TORCHRUN, "train.py", "out"], environment, folder, timeout_s=120)
        return folder, done.returncode, done.stderr.splitlines()

    programs = {"good": TRAIN + GOOD, "bad": TRAIN + BAD, "killed": KILLED}
    folders = list(map(tmp_path_factory.mktemp, programs))  # the factory is not for threads
    with ThreadPoolExecutor() as pool:
        return dict(zip(programs, pool.map(run, folders, programs.values()), strict=True))


def ours(lines):
    return [line for line in lines if line.startswith("areal-debug watch: ")]


def test_the_rank_of_a_nan_is_named_and_so_are_the_gradients_that_it_reaches(jobs):
    lines = [line for line in ours(jobs["bad"][2]) if "finite" in line]
    first = "step 2: not finite:"
    for rank in (0, 1):
        of_rank = [line.split(f"rank {rank}: ")[1] for line in lines if f"rank {rank}: " in line]
        assert of_rank[0] == f"{first} gradient of weight (nan), bias (nan)"
        loss = f"step {2 if rank == 1 else 3}: not finite: loss (nan)"
        weight = f"{first} weight weight (nan), bias (nan)"
        assert sorted(of_rank[1:3]) == sorted([loss, weight])
        assert of_rank[3].endswith(" further values were not finite")
        assert len(of_rank) == 4


def test_a_rank_that_never_enters_a_collective_is_diagnosed_and_the_job_ended(jobs):
    folder, status, errors = jobs["bad"]
    assert status == 1
    (diagnosis,) = (folder / "out").glob("hang-*/diagnosis.json")
    found = json.loads(diagnosis.read_text())
    assert (found["culprit_ranks"], found["victim_ranks"]) == ([1], [0])
    assert "culprits  1" in errors
    assert any("rank 0: waits in all_reduce" in line for line in errors)
    headline = next(line for line in ours(errors) if "silent" in line)
    assert f"silent for 2 s (limit 2 s): {found['label']}: " in headline
    assert (diagnosis.parent / "post_mortem.html").is_file()


def test_the_first_rank_that_is_killed_is_reported(jobs):
    _, status, errors = jobs["killed"]
    assert status == 1
    (line,) = ours(errors)
    assert re.search(r"^areal-debug watch: killed or crashed: .*\brank_1 \(pid \d+, 4 finished steps\)", line)


WAITS = """
from hangdoctor.collect.registered import STACKS_SIGNAL
def wait_here(w):
    w.step(0)
    threading.Event().wait()
with areal_debug.watch() as w:
    wait_here(w)
"""


@pytest.fixture
def plain_rank(tmp_path):
    """Start a rank without torch and without a launcher: `plain_rank(RANK, PROGRAM)`."""
    processes = []

    def start(rank, program, **environment):
        code = "import faulthandler, os, threading, time\nimport areal_debug\n" + program
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "here",
            "MASTER_PORT": str(os.getpid()),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT), **variables, **environment},
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        with process:
            process.kill()


def state_of(processes):
    """Wait until processes have finished a step; return the folder in which they are registered."""
    deadline = time.monotonic() + 20
    pids = {process.pid for process in processes}
    while time.monotonic() < deadline:
        for folder in Path(default_root(), "watch").glob("*"):
            beats = read_beats(folder)
            if pids <= {rank.pid for rank in read_registered(folder) if rank.name in beats}:
                return folder
        time.sleep(0.05)
    raise AssertionError("the ranks did not register")


def test_a_killed_rank_is_reported_where_no_launcher_does_and_the_others_go_on(plain_rank):
    waits = "with areal_debug.watch(timeout_s=60) as w:\n    w.step(0)\n    input()\n    w.step(1)"
    survivor = plain_rank(0, waits.replace("input()", "time.sleep(1.5)"))
    victim = plain_rank(1, waits.replace("input()", "threading.Event().wait()"))
    folder = state_of([survivor, victim])
    victim.kill()
    errors = survivor.communicate(timeout=20)[1] + victim.communicate()[1]
    dead = f"rank_1 (pid {victim.pid}, 1 finished steps)"
    assert errors == f"areal-debug watch: killed or crashed: {dead}\n"
    assert survivor.returncode == 0
    assert not folder.exists()


@pytest.mark.parametrize("handles", [True, False])
def test_ranks_write_their_own_stacks_where_py_spy_may_not_read_them(
    plain_rank, tmp_path, monkeypatch, handles
):
    """A process that no longer handles the signal gets none."""
    unregistered = "faulthandler.unregister(STACKS_SIGNAL); w.step"
    rank = plain_rank(0, WAITS if handles else WAITS.replace("w.step", unregistered))
    folder = state_of([rank])
    refused = pyspy.Dump("not_permitted", "Permission Denied", "", "Permission Denied")
    monkeypatch.setattr(pyspy, "dump", lambda *arguments, **options: refused)
    options = pyspy.Options(1, registered=folder)
    (found,) = collect_host(Search((rank.pid,)), tmp_path / "stacks", options).processes[:1]
    assert found.status == ("dumped" if handles else "not_permitted")
    if handles:
        assert "CAP_SYS_PTRACE" in found.detail
        assert "in wait_here" in (tmp_path / "stacks/samples/0/rank_0.txt").read_text()
    assert rank.poll() is None


def test_a_folder_that_cannot_be_made_gives_one_sentence_and_training_goes_on(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").touch()
    monkeypatch.setattr(block, "default_root", lambda: str(tmp_path / "file"))
    with areal_debug.watch(tmp_path / "file/stats") as w:
        w.step(0, loss=1.0)
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith(f"areal-debug watch: rank 0: hangs are not watched: {tmp_path}/file")
    assert second.startswith("areal-debug watch: rank 0: step 0 has no statistics: ")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 1))


def test_gradients_are_checked_before_any_optimizer_uses_them(model, capfd):
    optimizer = torch.optim.AdamW(model.parameters())
    with areal_debug.watch() as w:
        for step in range(4):
            model(torch.ones(1, 2)).sum().backward()
            if step >= 2:
                model[2].bias.grad[0] = torch.inf
            optimizer.step()
            optimizer.zero_grad()
        assert w.num_steps == 4
    assert capfd.readouterr().err.splitlines() == [
        "areal-debug watch: rank 0: step 2: not finite: gradient of parameter 3 [1] of AdamW (inf)",
        "areal-debug watch: rank 0: 1 further values were not finite",
    ]


def test_the_first_module_with_an_output_that_is_not_finite_is_named(model, capfd):
    with torch.no_grad():
        model[2].weight[0, 1] = torch.nan
    with areal_debug.watch(modules=model) as w:
        loss = model(torch.ones(1, 2)).sum()
        w.step(0, loss=loss, model=model)
    assert [line.split("rank 0: ")[1] for line in capfd.readouterr().err.splitlines()] == [
        "step 0: not finite: output of 2 (nan)",
        "step 0: not finite: loss (nan)",
        "step 0: not finite: weight 2.weight (nan)",
    ]
    model(torch.ones(1, 2))  # no hook is left
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("loss", [float("nan"), "tensor"])
def test_the_run_is_ended_where_that_was_requested_but_not_for_a_statistic(loss):
    loss = torch.tensor(torch.inf, requires_grad=True) if loss == "tensor" else loss
    with areal_debug.watch(then="end") as w:
        w.step(0, loss=1.0, stats={"empty": float("nan")})
        with pytest.raises(NonFiniteError, match=r"step 1: not finite: loss \((nan|inf)\)"):
            w.step(1, loss=loss)


def test_a_check_that_fails_is_reported_and_the_run_goes_on(model, capfd, monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("no memory")

    optimizer = torch.optim.SGD(model.parameters())
    monkeypatch.setattr(torch, "_foreach_norm", fails)
    with areal_debug.watch() as w:
        for step in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            w.step(step, loss=float("nan"))
    assert capfd.readouterr().err == (
        "areal-debug watch: rank 0: values are no longer checked: OutOfMemoryError: no memory\n"
    )


def test_the_child_gets_the_command_line_without_what_goes_with_watching():
    given = ["train", "--watch", "s.py", "--on-alarm", "echo a", "--stop-on=D17", "a.b=1"]
    assert without_watch(given) == ["train", "s.py", "a.b=1"]


@pytest.mark.long
def test_a_finding_stops_the_run_after_its_hooks(train, tmp_path):
    # with this learning rate all rewards are soon equal, and the weights do not move
    endless = ("total_train_steps=400", "total_train_epochs=30", "actor.optimizer.lr=0.5")
    hook = f"echo $AREAL_DEBUG_ALARM_RUN $AREAL_DEBUG_ALARM_ID >> {tmp_path}/alarms"
    done = train("--watch", "--stop-on", "all", "--on-alarm", hook, *endless)
    assert done.returncode == 1, done.stderr
    first = (tmp_path / "alarms").read_text().splitlines()[0]
    assert first.startswith("test D")
    assert f"doctor: stopping the run for {first.split()[1]}: SIGTERM" in done.stderr
    assert "interrupted after" in done.stdout
