"""`areal-debug consistency --conform`: does an engine hold the weights that it was sent?"""

from typing import NoReturn

from areal_debug.render import announce, is_quiet, note
from areal_debug.report.model import Block, Cell, Finding, Level, Report, Row, Table, tone_of
from areal_debug.report.terminal import answer
from consistency.entry.conform import TEXTS, Check, Result, conform

LEVELS: dict[str, Level] = {"pass": "good", "fail": "bad", "not offered": "dim", "undecided": "unsure"}


def check_conformance(engine: str, model: str, as_json: bool) -> NoReturn:
    """Check an engine's weight updates; print the report, end the command."""
    announce(f"replacing the weights of {engine}; those of {model} are sent back at the end")

    def report(check: Check) -> None:
        if not is_quiet():
            note(f"{check.name}: {check.verdict}")

    result = conform(engine, model, report)
    answer(result.document(), report_of(result), as_json)


def report_of(result: Result) -> Report:
    """Return the failed checks, then a row for each check."""
    counts = {verdict: sum(c.verdict == verdict for c in result.checks) for verdict in LEVELS}
    sentence = (
        ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
        + f"; {result.engine}, {result.dtype}, the same weights differ by up to {result.noise_floor:g} nats"
    )
    blocks: list[Block] = [finding_of(check) for check in result.checks if check.verdict == "fail"]
    headings = ("check", "", "expected", "holds", "mean |D| from each", "")
    blocks.append(Table(headings, list(map(cells, result.checks))))
    return Report(result.verdict.capitalize(), sentence, tone_of(result.verdict), blocks)


def finding_of(check: Check) -> Finding:
    seen = f"holds {check.held}, not {check.expected} ({distances_of(check)})" if check.held else ""
    evidence = Row("evidence", "; ".join(filter(None, (seen, check.evidence))))
    done, fix = (Row(key, TEXTS[check.name][key]) for key in ("done", "fix"))
    return Finding(check.name, "failed", "bad", [done, evidence, fix])


def distances_of(check: Check) -> str:
    return ", ".join(f"{name} {value:.2g}" for name, value in check.distances.items())


def cells(check: Check) -> tuple[str | Cell, ...]:
    verdict, evidence = Cell(check.verdict, LEVELS[check.verdict]), check.evidence * (check.verdict != "fail")
    return (check.name, verdict, check.expected, check.held, distances_of(check), evidence)
