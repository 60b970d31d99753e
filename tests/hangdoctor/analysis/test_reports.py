"""The complete reports of one diagnosis; the JSON object; the command line and its exit status."""

import json

import pytest
from click.testing import CliRunner

from areal_debug.verbs.hang import command
from tests.hangdoctor.analysis.test_records import WAITING

LEAVING = """Process {pid}: python train.py
Python v3.11.7

Thread {pid} (idle): "MainThread"
    destroy_process_group (torch/distributed/distributed_c10d.py:2146)
    <module> (train.py:95)
"""


@pytest.fixture
def stacks(tmp_path):
    """Three ranks, of which rank 1 destroys its process group."""
    for rank in range(3):
        (tmp_path / f"rank_{rank}.txt").write_text((LEAVING if rank == 1 else WAITING).format(pid=100 + rank))
    return tmp_path


def run(*arguments: str, standard_input: str = ""):
    return CliRunner().invoke(command, list(arguments), input=standard_input)


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
