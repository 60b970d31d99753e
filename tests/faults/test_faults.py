"""Every call of an operation that changes the disk fails once: nothing is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))
import disk  # noqa: E402


def inject(tmp_path, *options: object, timeout_s: int) -> list[dict]:
    """Run the fault loop; return the result of each operation."""
    control = tmp_path / "control"
    disk.open_control(control)  # creates it: the library maps it as a process starts
    environment = os.environ | {"PYTHONPATH": str(ROOT), disk.CONTROL: str(control)}
    environment["LD_PRELOAD"] = str(disk.build(tmp_path))
    command = [sys.executable, HERE / "fault_loop.py", tmp_path / "trials", *options]
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def losses_of(results: list[dict]) -> list[str]:
    return [f"{result['name']}: {loss}" for result in results for loss in result["losses"]]


@pytest.mark.long
def test_a_sample_of_faults_in_every_operation_loses_nothing(tmp_path):
    results = inject(tmp_path, "--most", 2, timeout_s=300)
    assert losses_of(results) == []
    assert [result["name"] for result in results if not result["faults"]] == []
    assert len(results) == 27


@pytest.mark.long
@pytest.mark.parametrize(
    "operations",
    [
        *("record, 1 rank", "record, 2 ranks", "record, re", "live archive", "extract|import|export"),
        *("archive a.zarr$", "archive a.zip$", "archive a.zarr --force", "archive a.zip --force"),
        *("open|hang", "statistics", "checkpoint", "model"),
    ],
)
def test_no_fault_loses_anything(tmp_path, operations):
    results = inject(tmp_path, "--only", operations, timeout_s=2 * 3600)
    for result in results:
        print(f"{result['name']:32} {result['calls']:5} calls {result['faults']:6} faults")
    assert losses_of(results) == []
