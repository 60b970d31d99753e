"""Twenty causes in real jobs of 8 processes: each is named in under 30 s, healthy jobs are not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "slow_ranks.py"
MOST_S = 30


@pytest.mark.long
def test_each_cause_is_named_and_no_healthy_job_is_accused(tmp_path):
    table = tmp_path / "table.json"
    done = subprocess.run([sys.executable, str(BENCHMARK), "--json", str(table)], check=False)
    results = json.loads(table.read_text())
    assert [result["summary"] for result in results if not result["right"]] == []
    assert [result["name"] for result in results if result["seconds"] > MOST_S] == []
    assert len([result for result in results if not result["name"].startswith("healthy")]) == 20
    assert done.returncode == 0
