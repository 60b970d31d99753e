"""The file in which rank 0 leaves its report, for the command that started the ranks."""

import json
import os
from pathlib import Path
from typing import Any

REPORT_FILE = "AREAL_DEBUG_REPORT"  # names the file
QUIET = "AREAL_DEBUG_QUIET"  # set: the ranks print nothing of the report


def write_report(report: dict[str, Any]) -> None:
    """Leave a report behind, if somebody waits for one."""
    if REPORT_FILE in os.environ:
        Path(os.environ[REPORT_FILE]).write_text(json.dumps(report))


def read_report(file: Path) -> dict[str, Any]:
    """The report that rank 0 left behind."""
    report: dict[str, Any] = json.loads(file.read_text())
    return report
