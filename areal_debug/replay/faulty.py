"""`areal-debug replay --find-faulty`: replays that vote on who computed wrongly, and the report."""

import tomllib
from pathlib import Path
from typing import NoReturn

from areal_debug.render import announce
from areal_debug.replay.ranks import refuse_damage, runner
from areal_debug.report.model import Finding, Report, Row, rows_of
from areal_debug.report.terminal import answer
from recorder import Record
from replayer.faulty import AFTER, BEFORE, FaultyReport, find_faulty
from replayer.preconditions import (
    check_model,
    check_recorded_results,
    check_steps_present,
    exact_summation,
)


def find(record: Record, first: int, last: int, model: str | None, num_ranks: int, as_json: bool) -> NoReturn:
    """Replay steps until it is known who computed wrongly, print the report and exit.

    Raises ReplayError, RecordError or ConfigError before the first replay.
    """
    check_recorded_results(record, "replay --find-faulty")
    exact_summation(record, num_ranks, "--find-faulty")
    check_steps_present(record, first, last)
    check_model(record, model, first)
    refuse_damage(record.path, len(record.steps))
    steps = [step for step in record.steps if first <= step <= last]
    with runner(model) as run:

        def replay(number: int) -> Record | None:
            announce(f"replay {number + 1} of steps {first} to {last}")
            return run.replay(record, first, last, apart=number > 0, shift=number, num_ranks=num_ranks)

        report = find_faulty(record, replay, steps)
    answer(report.to_dict(), report_of_faulty(report), as_json)


def report_of_faulty(report: FaultyReport) -> Report:
    """Return who computed wrongly, where, and what holds that up."""
    if report.kind == "sound":
        same = f"{report.num_replays} replays gave all {report.num_compared} recorded numbers, bit for bit."
        return Report("Nothing to accuse", same, "good")
    texts = Path(__file__).with_name("faulty.toml").read_text(encoding="utf-8")
    level, title, advice, refuted_by = tomllib.loads(texts)[report.kind].values()
    rows = [
        Row("place", place_of(report)),
        *([] if report.device is None else [Row("device", report.device)]),
        Row("differ", f"{report.num_different} of {report.num_compared} numbers of the step"),
        *rows_of("evidence", report.evidence),
        *rows_of("not recorded", report.missing),
        Row("next", advice.format(record=report.record), is_code=advice.startswith("areal-debug")),
        Row("refuted if", refuted_by),
    ]
    finding = Finding("", title, level, rows, f"confidence {report.confidence}")
    who = "" if report.rank is None or report.kind != "corruption" else f" on rank {report.rank}"
    return Report(report.kind.capitalize() + who, f"step {report.step}: {title}.", level, [finding])


def place_of(report: FaultyReport) -> str:
    """Return where the first number that differs was computed."""
    place = report.place
    assert place is not None
    around = {BEFORE: "before the update", AFTER: "after the update"}
    update = around.get(place.minibatch, f"{place.model}, minibatch {place.minibatch}")
    parts = [f"step {report.step}", update]
    parts += [] if report.rank is None else [f"rank {report.rank}"]
    parts += [] if place.micro_batch is None else [f"micro-batch {place.micro_batch}"]
    parts.append(place.what)
    parts += [] if report.element is None else [f"element {list(report.element)}"]
    parts += [] if report.bit is None else [f"bit {report.bit}"]
    return ", ".join(parts)
