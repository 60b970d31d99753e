"""The complete reports of one diagnosis; the JSON object; the command line and its exit status."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from areal_debug.hang.tree import merged_tree, tree_lines
from areal_debug.verbs.hang import command
from hangdoctor.model import Group
from hangdoctor.rules.order import explain, labels

WAITING = """Process {pid}: python train.py
Python v3.11.7

Thread {pid} (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2806)
    step (train.py:60)
    <module> (train.py:90)
"""
LEAVING = """Process {pid}: python train.py
Python v3.11.7

Thread {pid} (idle): "MainThread"
    destroy_process_group (torch/distributed/distributed_c10d.py:2146)
    <module> (train.py:95)
"""
REPORT = """cleanup_deadlock  medium confidence
Rank 1 is exiting (destroy_process_group at <module> (train.py:95)) while ranks 0,2 still wait in all_reduce.

culprits  1
victims   0,2

Ranks
      0  vXv
         v waits for others  X culprit

Stacks, outermost call first; * where ranks diverge
  * <module> (train.py:90)  [0,2]
  step (train.py:60)
  all_reduce (torch/distributed/distributed_c10d.py:2806)
  * <module> (train.py:95)  [1]
  destroy_process_group (torch/distributed/distributed_c10d.py:2146)

Evidence
  rank 1: exiting: destroy_process_group; its path diverges from its peers' at <module> (train.py:95)  \
destroy_process_group (torch/distributed/distributed_c10d.py:2146)
  rank 0,2: wait in all_reduce called from step (train.py:60)  all_reduce (torch/distributed/distributed_c10d.py:2806)
  -: one sample only: it cannot distinguish slow from stuck
  rank 0,2: waits for 1, which has not reached all_reduce

Next
"""


@pytest.fixture
def stacks(tmp_path):
    """Three ranks, of which rank 1 destroys its process group."""
    for rank in range(3):
        (tmp_path / f"rank_{rank}.txt").write_text((LEAVING if rank == 1 else WAITING).format(pid=100 + rank))
    return tmp_path


def run(*arguments: str, standard_input: str = ""):
    return CliRunner().invoke(command, list(arguments), input=standard_input)


def test_stacks_are_read_from_standard_input():
    text = "idle: rank 0-2\n  all_reduce (distributed_c10d.py:2806)\nidle: rank 3\n  barrier (distributed_c10d.py:3703)\n"
    done = run("diagnose", "-", "--json", standard_input=text)
    assert json.loads(done.output)["culprit_ranks"] == [3]
    assert run("diagnose", "-", standard_input="nothing\n").exit_code == 2


def test_terminal_report_whole(stacks):
    done = run("diagnose", str(stacks))
    assert done.exit_code == 1
    assert done.output.startswith(REPORT)
    for title in ("Next", "Would refute it"):
        assert f"\n{title}\n" in done.output


def test_json_is_exactly_the_documented_object(stacks):
    document = json.loads(run("diagnose", str(stacks), "--json").output)
    assert list(document) == [
        "label", "confidence", "culprit_ranks", "victim_ranks", "summary", "evidence", "next_steps", "would_refute",
        "alternatives", "groups", "ranks", "collect", "kind",
    ]  # fmt: skip
    assert (document["label"], document["culprit_ranks"], document["victim_ranks"]) == (
        "cleanup_deadlock",
        [1],
        [0, 2],
    )
    assert document["groups"][0] == {
        "ranks": "0,2", "size": 2, "waits_for": "collective", "doing": "all_reduce",
        "stack": ["all_reduce (torch/distributed/distributed_c10d.py:2806)", "step (train.py:60)", "<module> (train.py:90)"],
    }  # fmt: skip
    assert document["evidence"][0] == {
        "ranks": "1", "fact": "exiting: destroy_process_group; its path diverges from its peers' at <module> (train.py:95)",
        "process": "rank_1", "thread": "MainThread", "frame": "destroy_process_group",
        "location": "torch/distributed/distributed_c10d.py:2146",
    }  # fmt: skip


def test_the_page_agrees_with_the_terminal(stacks):
    page = stacks.parent / "p.html"
    run("diagnose", str(stacks), "--output", str(page))
    html = page.read_text()
    assert html.count('class="cell victim"') == 2
    assert html.count('class="cell culprit"') == 1
    assert "http" not in html.replace("http-equiv", "")
    assert "rank 0,2, sample 0" in html


@pytest.mark.parametrize(
    ("texts", "status", "label"),
    [
        ({0: WAITING}, 2, "unknown"),
        ({0: WAITING, 1: WAITING}, 1, "nccl_timeout"),
        ({0: LEAVING, 1: WAITING, 3: WAITING}, 2, "cleanup_deadlock  low confidence"),
        ({}, 2, "No stacks of any rank"),
    ],
)
def test_exit_status_distinguishes_hung_from_inconclusive(tmp_path, texts, status, label):
    for rank, text in texts.items():
        (tmp_path / f"rank_{rank}.txt").write_text(text.format(pid=5 + rank))
    done = run("diagnose", str(tmp_path))
    assert done.exit_code == status
    assert label in done.output


def test_unknown_lists_what_to_collect(tmp_path):
    (tmp_path / "rank_0.txt").write_text(WAITING.format(pid=5))
    document = json.loads(run("diagnose", str(tmp_path), "--json").output)
    assert [line.split(":")[0] for line in document["collect"]] == [
        "the stacks of all other ranks",
        "a second sample some seconds later",
        "native frames (py-spy dump --native)",
        "Flight Recorder dumps (TORCH_FR_BUFFER_SIZE=2000)",
        "the last lines of each rank's log",
    ]


@pytest.mark.parametrize("label", labels())
def test_every_label_is_taught(label):
    lesson = explain(label)
    assert lesson.startswith(f"{label}\n\n")
    assert "What it looks like:" in lesson


def test_tree_shows_where_ranks_part():
    groups = (
        Group(
            "0-5,7", 7, "collective", "all_reduce", ("all_reduce (c.py:1)", "step (t.py:2)", "main (t.py:9)")
        ),
        Group("6", 1, "data", "DataLoader", ("next (d.py:1)", "step (t.py:3)", "main (t.py:9)")),
    )
    lines = [(line.indent, line.text, line.ranks, line.fork) for line in tree_lines(merged_tree(groups))]
    assert lines == [
        (0, "main (t.py:9)", "0-7", False),
        (1, "step (t.py:2)", "0-5,7", True),
        (1, "all_reduce (c.py:1)", "", False),
        (1, "step (t.py:3)", "6", True),
        (1, "next (d.py:1)", "", False),
    ]


def test_hangdoctor_comes_up_without_torch_and_click():
    heavy = ("torch", "click", "rich", "numpy")
    code = f"import sys, hangdoctor.diagnose; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_next_steps_end_with_the_smallest_job_that_keeps_the_pattern(stacks):
    step = json.loads(run("diagnose", str(stacks), "--json").output)["next_steps"][-1]
    assert step["do"] == "torchrun --nproc-per-node 2 ..."
    assert step["why"].endswith("here those of 0-1")
