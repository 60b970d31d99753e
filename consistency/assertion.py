"""`assert_consistent`, for tests: a record's engine logprobs must be those of its model."""

import os
from typing import Any

from consistency.case import Request
from consistency.check import Checked, check
from consistency.report import check_gates
from consistency.source import read_record
from recorder import open_record


def assert_consistent(
    record: str | os.PathLike[str],
    model: str | None = None,
    *,
    steps: tuple[int, ...] = (),
    gate: str = "",
    **options: Any,
) -> Checked:
    """Raise AssertionError unless the verdict is healthy and every gate holds.

    Args:
        record: folder or archive of a record.
        model: checkpoint that should have sampled the steps, a folder; by default the run's initial
            one.
        steps: by default the first one.
        gate: upper limits of metrics, such as `mean_abs=0.02,k3=0.002`; log-probs are in nats.
        options: further fields of `consistency.case.Request`.

    Raises:
        AssertionError: names the most likely cause with evidence and fix, and every failed gate.
        RecordError: the record or a step cannot be read.
        ModelError: a checkpoint cannot be read.
        ConsistencyError: there is nothing to compare, or a gate is invalid.
    """
    opened = open_record(record)
    checked = check(
        read_record(opened, steps or opened.steps[:1]),
        Request(model or opened.header.model["path"], **options),
    )
    found = checked.diagnosis
    complaints = [
        f"gate {held.metric} <= {held.limit:g} does not hold: {held.value:.6g}"
        for held in check_gates(gate, found.measurement.metrics)
        if not held.holds
    ]
    if found.verdict != "healthy":
        complaints.insert(0, complaint_of(checked))
    if complaints:
        raise AssertionError(
            "\n".join([*complaints, f"for the full report run: areal-debug consistency {os.fspath(record)}"])
        )
    return checked


def complaint_of(checked: Checked) -> str:
    found = checked.diagnosis
    size = f"mean |D| {found.measurement.metrics['mean_abs']:.3g} over {found.measurement.num_tokens} tokens"
    if not found.causes:
        return f"{found.verdict}: {size}, and no known cause explains it; give {'; '.join(found.missing)}"
    first = found.causes[0]
    return f"{found.verdict}: {first.name} ({first.id}), {size}\n  evidence: {first.evidence}\n  fix: {first.fix}"
