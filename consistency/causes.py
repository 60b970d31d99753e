"""The causes of a mismatch: rows of `causes.toml`, filled in with what a check has measured."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A cause with its evidence, or a row of causes, whose texts have fields to fill in.

    One with `fault` false explains the difference without being a fault. `refute` says what settles
    it. `confidence` 0 of a row: from how much it explains.
    """

    id: str
    name: str
    confidence: float
    evidence: str
    refute: str
    fix: str
    fault: bool = True


CAUSES = {
    key: Finding(**{"id": key.partition(".")[0], "confidence": 0.0} | row)
    for key, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}


def finding(key: str, sure: float | None = None, *, is_fault: bool | None = None, **fields: Any) -> Finding:
    """Fill in the row `RNN` or `RNN.x`; `sure` and `is_fault` override what it says."""
    row = CAUSES[key]
    texts = {name: getattr(row, name).format(**fields) for name in ("name", "evidence", "refute", "fix")}
    confidence = row.confidence if sure is None else sure
    return replace(row, confidence=confidence, fault=row.fault if is_fault is None else is_fault, **texts)
