"""docs/exports.md: every command and every line of Python runs on a record."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

from tests.exports.given import write_full_record

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/exports.md").read_text()


def blocks(kind: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == kind]


@pytest.mark.long
def test_commands_and_python_of_the_page_run(tmp_path):
    for place in ("runs/record", "runs/a/record"):
        write_full_record(tmp_path / place)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    commands = [line for block in blocks("") for line in block.splitlines()]
    assert len(commands) == 13
    for line in commands:
        assert line.startswith("areal-debug ")
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)
    for text in blocks("python"):
        done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, env=environment)
        assert done.returncode == 0, text
    assert parquet.read_table(tmp_path / "samples.parquet").num_rows == 16
    assert {path.name for path in (tmp_path / "samples").iterdir()} == {"step=0", "step=1"}
    assert parquet.read_table(tmp_path / "step3.parquet").num_rows == 0
