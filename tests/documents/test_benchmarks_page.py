"""docs/benchmarks.md is what its results say, and each of its commands exists."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("peers", ROOT / "benchmarks/peers.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "peers", module)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_of_the_results(peers):
    results = json.loads(peers.RESULTS.read_text())
    assert peers.PAGE.read_text() == peers.page(results)
    assert set(results) <= {topic.name for topic in peers.TOPICS}
    for topic in peers.TOPICS:
        assert (ROOT / "benchmarks" / topic.command.split()[0]).is_file()


def test_a_ratio_is_theirs_to_ours(peers, capsys):
    from peer_results import MARK, report

    report("a step", "another's", "s", [1.0, 2.0, 4.0], [3.0, 4.0, 4.0])
    row = json.loads(capsys.readouterr().out.removeprefix(MARK))
    assert row["ratio"] == [2.0, 1.0, 3.0]
    assert peers.table([row]).splitlines()[2] == "| a step | another's | 2 s | 4 s | 2.00 (1.00 to 3.00) |"


def test_a_failing_benchmark_keeps_the_rows_before(peers, tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/silent.py").write_text("print('no row')\n")
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(peers, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(peers, "TOPICS", [peers.Topic("silent", "Silent", "silent.py")])
    monkeypatch.setattr(sys, "argv", ["peers.py"])
    peers.RESULTS.write_text('{"step": 1}')
    with pytest.raises(SystemExit, match=r"silent\.py ended with 0 and reported 0 rows"):
        peers.main()
    assert peers.RESULTS.read_text() == '{"step": 1}'
