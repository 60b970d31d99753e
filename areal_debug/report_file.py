"""The file into which rank 0 writes its report, for the command that started the ranks."""

import json
import os
from pathlib import Path
from typing import Any

REPORT_FILE = "AREAL_DEBUG_REPORT"  # path of the file
QUIET = "AREAL_DEBUG_QUIET"  # if set, the ranks do not print their report


def write_report(report: dict[str, Any]) -> None:
    """Write a report, if the command that started this rank has named a file."""
    if REPORT_FILE in os.environ:
        Path(os.environ[REPORT_FILE]).write_text(json.dumps(report))


def read_report(file: Path) -> dict[str, Any]:
    """Read the report that rank 0 wrote."""
    report: dict[str, Any] = json.loads(file.read_text())
    return report
