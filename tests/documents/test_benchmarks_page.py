"""docs/measurements/benchmarks.md is what its results say, and each of its commands exists."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.harness import MARK, report

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_of_the_results():
    results = json.loads(peers.RESULTS.read_text())
    assert peers.PAGE.read_text() == peers.page(results)
    assert set(results) <= {topic.name for topic in peers.TOPICS}
    for topic in peers.TOPICS:
        assert (ROOT / "benchmarks" / f"{topic.command.split()[0]}.py").is_file()


def test_a_ratio_is_theirs_to_ours(capsys):
    report("a step", "another's", "s", [1.0, 2.0, 4.0], [3.0, 4.0, 4.0])
    row = json.loads(capsys.readouterr().out.removeprefix(MARK))
    assert row["ratio"] == [2.0, 1.0, 3.0]
    assert peers.table([row]).splitlines()[2] == "| a step | another's | 2 s | 4 s | 2.00 (1.00 to 3.00) |"


def test_a_failing_benchmark_keeps_the_rows_before(tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/silent.py").write_text("print('no row')\n")
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(peers, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(peers, "TOPICS", [peers.Topic("silent", "Silent", "silent")])
    monkeypatch.setattr(sys, "argv", ["peers.py"])
    peers.RESULTS.write_text('{"step": 1}')
    with pytest.raises(SystemExit, match="silent ended with 0 and reported 0 rows"):
        peers.main()
    assert peers.RESULTS.read_text() == '{"step": 1}'
