"""Print the answer of `why`: the sentence, its evidence, what was set differently."""

from pathlib import Path

from rich.text import Text

from areal_debug.diff.render import describe
from areal_debug.render import console, format_value, styled
from replayer.why.report import Setting, WhyReport

COLOURS = {"identical": "green", "not comparable": "yellow", "same weights, other numbers": "yellow"}
WIDTH = 12
SHOWN_SETTINGS = 12


def print_report(report: WhyReport, page: Path | None = None) -> None:
    """Print the complete answer; its first line is the sentence."""
    out = console()
    verdict, _, rest = report.sentence.partition(":")
    colour = COLOURS.get(report.verdict, "red")
    out.print(Text.assemble((f"{verdict}:", f"bold {colour}"), styled("{}", rest)))
    for name, text in facts_of(report):
        out.print(styled("[dim]{}[/dim] {}", name.ljust(WIDTH), text))
    if report.settings:
        out.print()
        out.print(styled("[dim]not the same in A and B[/dim]"))
        for setting in report.settings[:SHOWN_SETTINGS]:
            out.print(setting_line(setting))
        if len(report.settings) > SHOWN_SETTINGS:
            out.print(
                styled(
                    "[dim]  ... and {} more: --json lists them[/dim]", len(report.settings) - SHOWN_SETTINGS
                )
            )
    if page is not None:
        out.print(styled("[dim]{} {}[/dim]", "page".ljust(WIDTH), page))


def facts_of(report: WhyReport) -> list[tuple[str, str]]:
    """Return the lines below the sentence: a name, empty where it is repeated, and a text."""
    facts: list[tuple[str, list[str]]] = []
    if report.difference is not None and report.finding is not None:
        finding, cause = report.finding, report.finding.cause
        source = (
            "" if cause.file is None else f"; {cause.file}" + ("" if cause.line is None else f":{cause.line}")
        )
        weights = "never differ" if report.diverged_at is None else f"differ after step {report.diverged_at}"
        if report.diverged_at is None and report.verdict == "diverged":
            weights = "are not recorded"
        facts += [
            (
                "place",
                [describe(report.difference), *([f"first layer: {finding.layer}"] if finding.layer else [])],
            ),
            (
                "text",
                [
                    f"{side}  {t.before}[{t.token}]{t.after}"
                    for side, t in zip("AB", report.text or (), strict=False)
                ],
            ),
            ("pattern", [f"{report.pattern}: {report.pattern_detail}"] if report.pattern else []),
            ("equal", [", ".join(report.equal)] if report.equal else []),
            ("weights", [weights]),
            ("cause", [f"{cause.kind}, {finding.confidence} confidence{source}"]),
            ("evidence", list(finding.evidence)),
            ("refuted if", [finding.refuted_by]),
            ("look", [report.look] if report.look else []),
            ("next", [finding.next]),
        ]
    facts += [
        ("also", list(report.also)),
        ("not known", ["; ".join(report.not_known)] if report.not_known else []),
        ("not recorded", [", ".join(report.not_compared)] if report.not_compared else []),
    ]
    return [(name if index == 0 else "", line) for name, lines in facts for index, line in enumerate(lines)]


def setting_line(setting: Setting) -> Text:
    values = "" if setting.is_outside else f"  {format_value(setting.left)} | {format_value(setting.right)}"
    mark = "[bold]acts[/bold]" if setting.acts else "[dim]no  [/dim]"
    return styled("  " + mark + "  {}{}  [dim]{}[/dim]", setting.where, values, setting.why)
