"""Show a report on a terminal, or in a pipe as plain text."""

from collections.abc import Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from areal_debug.render import console, one_line, print_json, sparkline, styled
from areal_debug.report.model import Block, Cell, Curve, Facts, Finding, Picture, Report, Row, Styled, Table

STYLES = {"good": "green", "bad": "red", "unsure": "yellow", "dim": "dim", "": ""}
LABEL_WIDTH, CURVE_WIDTH = 12, 28


def print_answer(document: Any, report: Report, as_json: bool) -> None:
    """Print what a verb found: the document as JSON, or the report."""
    if as_json:
        print_json(document)
    else:
        print_report(console(), report)


def answer(document: Any, report: Report, as_json: bool) -> NoReturn:
    """Print what a verb found, and end it with the exit code of its verdict."""
    print_answer(document, report, as_json)
    raise SystemExit(report.exit_code)


def print_report(out: Console, report: Report) -> None:
    """Print the verdict, the notes, then every block that a terminal shows."""
    out.print(first_line(report))
    for note in report.notes:
        out.print(styled("[dim]{}[/dim]", note))
    for block in report.blocks:
        print_block(out, block)


def first_line(report: Report) -> Text:
    style = f"bold {STYLES[report.level]}".strip()
    rest = f": {report.sentence}" if report.sentence else ""
    return Text.assemble((one_line(report.verdict).plain, style), one_line(rest))


def print_block(out: Console, block: Block) -> None:
    match block:
        case str():
            out.print(styled("{}", block))
        case Styled():
            out.print(block.text)
        case Facts():
            if block.title:
                out.print()
                out.print(styled("[bold]{}[/bold]", block.title))
            print_rows(out, block.rows, "  " if block.title else "")
        case Table() if block.only != "page":
            out.print(table_of(block))
        case Curve():
            label, line = f"{block.label:<{CURVE_WIDTH}}", sparkline(block.values)
            out.print(styled("{}{}  [dim]{}[/dim]", label, line, block.ends))
        case Finding():
            print_finding(out, block)
        case Picture() | Table():
            return


def print_finding(out: Console, finding: Finding) -> None:
    style = f"bold {STYLES[finding.level]}".strip()
    out.print()
    out.print(
        styled(f"[{style}]{{}}[/]  [dim]{{}}[/dim]", f"{finding.id}  {finding.title}".strip(), finding.note)
    )
    if finding.curve is not None:
        print_rows(out, [Row("curve", f"{sparkline(finding.curve.values)}  {finding.curve.label}")], "  ")
    print_rows(out, finding.rows, "  ")


def print_rows(out: Console, rows: Sequence[Row], indent: str) -> None:
    width = max([LABEL_WIDTH, *(len(row.label) for row in rows)])
    for row in rows:
        label = styled(f"{indent}[dim]{{:<{width}}}[/dim] ", row.label)
        out.print(label.append_text(one_line(row.text, STYLES[row.level])))


def table_of(table: Table) -> RichTable:
    made = RichTable(
        title=table.title or None, title_justify="left", box=None, pad_edge=False, header_style="dim"
    )
    for heading in table.headings:
        is_number = heading.endswith(">")
        name = one_line(heading.removesuffix(">"))
        made.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*(cell_text(cell) for cell in row))
    if table.more:
        made.add_row(table.more)
    return made


def cell_text(cell: str | Cell) -> Text:
    return one_line(cell.text, STYLES[cell.level]) if isinstance(cell, Cell) else one_line(cell)
