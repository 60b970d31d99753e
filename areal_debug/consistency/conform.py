"""`areal-debug consistency --conform`: does an engine hold the weights that it was sent?"""

from areal_debug.render import announce, is_quiet, note
from areal_debug.report.model import Block, Cell, Finding, Level, Report, Row, Table
from areal_debug.report.terminal import print_answer
from consistency.entry.conform import TEXTS, Check, Result, conform

EXIT_CODES = {"conforms": 0, "fails": 1, "undecided": 2}
LEVELS: dict[str, Level] = {"pass": "good", "fail": "bad", "not offered": "dim", "undecided": "unsure"}


def check_conformance(engine: str, model: str, as_json: bool) -> int:
    """Check an engine's weight updates; print the report, return the exit code."""
    announce(f"replacing the weights of {engine}; those of {model} are sent back at the end")

    def report(check: Check) -> None:
        if not is_quiet():
            note(f"{check.name}: {check.verdict}")

    result = conform(engine, model, report)
    print_answer(result.document(), report_of(result), as_json)
    return EXIT_CODES[result.verdict]


def report_of(result: Result) -> Report:
    """Return the failed checks, then a row for each check."""
    counts = {verdict: sum(c.verdict == verdict for c in result.checks) for verdict in LEVELS}
    sentence = (
        ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
        + f"; {result.engine}, {result.dtype}, the same weights differ by up to {result.noise_floor:g} nats"
    )
    level = {"conforms": LEVELS["pass"], "fails": LEVELS["fail"]}.get(result.verdict, "unsure")
    blocks: list[Block] = [finding_of(check) for check in result.checks if check.verdict == "fail"]
    headings = ("check", "", "expected", "holds", "mean |D| from each", "")
    blocks.append(Table(headings, list(map(cells, result.checks))))
    return Report(result.verdict.capitalize(), sentence, level, blocks)


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
