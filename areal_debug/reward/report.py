"""Report of `areal-debug reward`: what a function pays for, where a record disagrees."""

from areal_core.safety.printable import printable
from areal_debug.render import format_number
from areal_debug.report.links import view_command
from areal_debug.report.model import Block, Cell, Facts, Level, Report, Row, Table, rows_of, tone_of
from areal_debug.reward.probe import Finding, ProbeReport
from areal_debug.reward.rescore import RescoreReport

LONGEST_EXAMPLE = 70
MOST_STEPS, MOST_ROWS = 20, 10
WORDS = {"problem": "Pays for what is wrong", "sound": "Sound", "unknown": "Inconclusive"}
STEP_HEADINGS = ("step>", "samples>", "agree>", "false positives>", "false negatives>", "failed>")


def report_of_probe(report: ProbeReport) -> Report:
    """Return the verdict, the table of kinds of answers, and the notes."""
    notes = [f"{report.num_calls} calls on {report.num_rows} rows of {report.data}"]
    if report.right is not None and report.wrong is not None:
        paid = (
            f"{format_number(report.right)} for a right answer, {format_number(report.wrong)} for a wrong one"
        )
        notes.insert(0, f"{paid}; right answers are paid as: {', '.join(report.formats)}")
    headings = ("answer", "verdict", "paid>", "failed>", "mean>", "for example")
    table = Table(headings, [cells_of(found) for found in report.findings])
    blocks: list[Block] = [table, Facts(rows_of("note", report.notes, "unsure"))]
    sentence = f"{report.function}: {report.sentence}"
    return Report(WORDS[report.verdict], sentence, tone_of(report.verdict), blocks, notes)


def cells_of(found: Finding) -> list[str | Cell]:
    level: Level = "bad" if found.is_problem else "dim" if found.verdict == "ok" else "unsure"
    example = f"{printable(found.example, LONGEST_EXAMPLE)!r}"
    if found.failure:
        example += f" ({found.failure})"
    return [
        found.kind,
        Cell(found.verdict, level),
        f"{found.paid} of {found.tried}",
        str(found.failed) if found.failed else "",
        "" if found.mean_reward is None else f"{found.mean_reward:.3g}",
        example if found.verdict != "ok" else "",
    ]


def report_of_rescore(report: RescoreReport) -> Report:
    """Return the verdict, a table of the steps with disagreements, and ten samples of each kind."""
    failed, unmatched = report.total("failed"), report.total("unmatched")
    rows = [Row("failed", f"{failed:,} calls failed: {report.failure}", "unsure")] if failed else []
    if "missing a required argument" in report.failure:
        rows.append(Row("next", "--data FILE gives the function the fields of its rows"))
    if unmatched:
        rows.append(Row("unmatched", f"{unmatched:,} samples: no row of the data has their prompt", "unsure"))
    rows += rows_of("paired", [pairing.sentence for pairing in report.pairings[:MOST_ROWS]], "bad")
    blocks: list[Block] = [Facts(rows)]
    if report.disagreements:
        blocks += [table_of_steps(report), Facts(rows_of_samples(report))]
    notes = [f"paid is a reward above {format_number(report.middle)}"]
    return Report(*verdict_of(report), blocks, notes)


def verdict_of(report: RescoreReport) -> tuple[str, str, Level]:
    positives, negatives = report.total("false_positives"), report.total("false_negatives")
    if report.verdict == "unknown":
        compared = f"{report.num_compared:,} of {report.total('rows'):,}"
        return "Inconclusive", f"{compared} samples have both rewards", "unsure"
    if report.verdict == "agree":
        if other := report.other_values:
            where = f"on which of {report.num_compared:,} samples are paid; {other:,} have another reward"
            return "They agree", where, "unsure"
        return "They agree", f"on {report.num_compared:,} samples", "good"
    if report.pairings:
        return "Rewards of other rows", report.pairings[0].sentence, "bad"
    if report.every_recorded is not None:
        where = (
            f"of {report.num_compared:,} samples, and {report.function} differs on {positives + negatives:,}"
        )
        why = "was it called, and are its exceptions swallowed?"
        return (
            "One reward",
            f"{format_number(report.every_recorded)} is the recorded reward of all {where}: {why}",
            "bad",
        )
    return (
        "They disagree",
        f"on {positives + negatives:,} of {report.num_compared:,} samples: {positives:,} are paid by the record "
        f"alone (false positives), {negatives:,} by {report.function} alone (false negatives)",
        "bad",
    )


def rows_of_samples(report: RescoreReport) -> list[Row]:
    rows = []
    for kind in ("false positive", "false negative"):
        found = [item for item in report.disagreements if item.kind == kind]
        for item in found[:: max(1, len(found) // MOST_ROWS)][:MOST_ROWS]:
            rewards = f"recorded {format_number(item.recorded)}, now {format_number(item.rescored)}"
            rows.append(Row(kind, f"{rewards}  {printable(item.text[-LONGEST_EXAMPLE:])!r}"))
            look = view_command(report.record, item.step, item.prompt, item.sample)
            rows.append(Row("", look, "dim", is_code=True))
    return rows


def table_of_steps(report: RescoreReport) -> Table:
    wrong = [step for step in report.steps if step.false_positives + step.false_negatives]
    shown = sorted(wrong, key=lambda step: -(step.false_positives + step.false_negatives))[:MOST_STEPS]
    rows = [
        [f"{n:,}" for n in (s.step, s.rows, s.agree, s.false_positives, s.false_negatives, s.failed)]
        for s in sorted(shown, key=lambda step: step.step)
    ]
    more = f"... {len(wrong) - len(shown)} more" if len(wrong) > len(shown) else ""
    return Table(STEP_HEADINGS, rows, more=more)
