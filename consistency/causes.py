"""The causes of a mismatch: rows of `causes.toml`, filled in with what a check has measured."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A cause with its evidence.

    One with `fault` false explains the difference without being a fault.
    """

    id: str
    name: str
    confidence: float
    evidence: str
    refute: str
    fix: str
    fault: bool = True


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One row; `refute` says what settles it. `confidence` 0: from how much it explains."""

    name: str
    evidence: str
    refute: str
    fix: str
    confidence: float = 0.0
    fault: bool = True


CAUSES = {
    key: Cause(**row)
    for key, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}


def finding(key: str, sure: float | None = None, *, is_fault: bool | None = None, **fields: Any) -> Finding:
    """Fill in the row `RNN` or `RNN.x`; `sure` and `is_fault` override what it says."""
    row = CAUSES[key]
    return Finding(
        key.partition(".")[0],
        row.name.format(**fields),
        row.confidence if sure is None else sure,
        row.evidence.format(**fields),
        row.refute.format(**fields),
        row.fix.format(**fields),
        row.fault if is_fault is None else is_fault,
    )
