"""The tree of an episode in a record: written, verified, read back and shown."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_core.agent.agents import load_agent
from areal_core.rollout.episodes import assemble
from areal_debug.verbs.record import command
from recorder import RecordWriter, open_record, verify
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


def test_show_names_the_place_of_a_row_and_the_failure(record):
    shown = CliRunner().invoke(command, ["show", str(record), "--sample", "2"]).output
    assert (
        "episode 0, turns 0, 3  the template leaves out reasoning that was sampled after turn 1  "
        "failed by the model: declared" in " ".join(shown.splitlines())
    )


def test_verify_names_a_changed_turn(record):
    assert verify(record).intact
    (name, entry), *_ = open_record(record).step(0).manifest.batches.items()
    file = record / "steps/000000" / name
    content = bytearray(file.read_bytes())
    content[entry.tensors["turns"].offset + 3] ^= 1
    file.write_bytes(content)
    assert [problem.tensor for problem in verify(record).problems] == ["turns"]
