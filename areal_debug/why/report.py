"""The answer of `why`: the sentence, its place and evidence, and what was set differently."""

from areal_debug.diff.report import describe, format_value, rows_of_text
from areal_debug.report.model import Block, Cell, Facts, Level, Report, Row, Table, rows_of
from replayer.why.report import Finding, Setting, WhyReport

LEVELS: dict[str, Level] = {
    "identical": "good",
    "not comparable": "unsure",
    "same weights, other numbers": "unsure",
}
SHOWN_SETTINGS = 12  # on a terminal


def report_of(report: WhyReport) -> Report:
    """Return the complete answer; its first line is the sentence."""
    verdict, _, rest = report.sentence.partition(": ")
    rows = [] if report.finding is None else rows_of_finding(report, report.finding)
    rows += rows_of("also", report.also)
    rows += [Row("not known", "; ".join(report.not_known))] if report.not_known else []
    if report.not_compared:
        lacking = f"the trainer's {' and '.join(report.not_compared)}".replace("logprobs", "log-probs")
        rows.append(Row("not recorded", f"{lacking} (debug.dump_scope=full records them)"))
    blocks: list[Block] = [Facts(rows)] if rows else []
    if report.settings:
        more = len(report.settings) - SHOWN_SETTINGS
        left_out = f"... and {more} more: --json lists them" if more > 0 else ""
        headings, title = ("what", "A", "B", "acts", "why"), "Not the same in A and B"
        cells = [cells_of(setting) for setting in report.settings]
        blocks += [
            Table(headings, cells[:SHOWN_SETTINGS], title, left_out, only="terminal"),
            Table(headings, cells, title, only="page"),
        ]
    compared = f"{report.num_compared} of {report.num_shared} common steps compared"
    notes = [f"A is {report.left}, B is {report.right}; {compared}"]
    return Report(verdict, rest, LEVELS.get(report.verdict, "bad"), blocks, notes)


def rows_of_finding(report: WhyReport, finding: Finding) -> list[Row]:
    """Return the place, how the values differ, the cause, what holds it up, and what to do."""
    first, cause = report.difference, finding.cause
    if first is None:
        return []
    weights = "never differ" if report.diverged_at is None else f"differ after step {report.diverged_at}"
    if report.diverged_at is None and report.verdict == "diverged":
        weights = "are not recorded"
    line = "" if cause.line is None else f":{cause.line}"
    source = "" if cause.file is None else f"; {cause.file}{line}"
    return [
        Row("place", describe(first)),
        *([Row("", f"first layer: {finding.layer}")] if finding.layer else []),
        *rows_of_text(report.text),
        *([Row("pattern", f"{report.pattern}: {report.pattern_detail}")] if report.pattern else []),
        *([Row("equal", ", ".join(report.equal))] if report.equal else []),
        Row("weights", weights),
        Row("cause", f"{cause.kind}, {finding.confidence} confidence{source}"),
        *rows_of("evidence", finding.evidence),
        Row("refuted if", finding.refuted_by),
        *([Row("look", report.look, is_code=True)] if report.look else []),
        Row("next", finding.next, is_code=True),
    ]


def cells_of(setting: Setting) -> list[str | Cell]:
    outside = setting.is_outside
    values = ("", "") if outside else (format_value(setting.left), format_value(setting.right))
    acts = Cell("yes", "bad") if setting.acts else Cell("no", "dim")
    return [setting.where, *values, acts, Cell(setting.why, "dim")]
