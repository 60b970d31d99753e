"""The tree of an episode in a record: written, verified, read back and shown."""

from pathlib import Path

import pytest

from areal_core.agent.agents import load_agent
from areal_core.rollout.episodes import assemble
from recorder import RecordWriter, open_record
from recorder.header import write_header
from recorder.samples import Branch, read_samples
from recorder.testing import SCRIPTED_HEADER, send_step

AGENTS = Path(__file__).parent / "agents_under_test.py"


@pytest.fixture
def record(episode, scripted_engine, tmp_path):
    """One step of two episodes: five calls in four branches that failed, and one call."""
    data = {"messages": [{"role": "user", "content": "?"}]}
    branching = load_agent(f"{AGENTS}:Branching")
    lines = ("ab", "<think>x</think>c", "d", "e", "f")
    first = episode(branching, scripted_engine(*lines), data, export_style="concat")
    second = episode(load_agent(f"{AGENTS}:Plain"), scripted_engine("g"), data, export_style="concat")
    folder = tmp_path / "record"
    folder.mkdir()
    writer = RecordWriter(folder)
    write_header(folder, SCRIPTED_HEADER)
    send_step(writer, 0, assemble([(5, [first, second])]))
    writer("end", steps=1, error=None)
    return folder


def test_a_record_has_the_tree_of_each_episode(record):
    samples = read_samples(open_record(record).step(0), 0, [0, 1, 2, 3, 4], None)
    assert [sample.place for sample in samples] == [
        Branch(episode=0, turns=(0, 1), parent_turn=-1, branch=0, failure=1),
        Branch(episode=0, turns=(0, 2), parent_turn=0, branch=2, failure=1),
        Branch(episode=0, turns=(0, 3), parent_turn=1, branch=5, failure=1),
        Branch(episode=0, turns=(4,), parent_turn=3, branch=10, failure=1),
        Branch(episode=1, turns=(0,), parent_turn=-1, branch=0, failure=0),
    ]
