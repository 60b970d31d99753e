"""Print the report of `areal-debug parity`. Imports no torch."""

from typing import Any

from rich.console import Console
from rich.table import Table

from areal_debug.render import format_number, format_seconds, styled


def print_parity(out: Console, model: str, allocation: str, report: dict[str, Any]) -> None:
    """Print the verdict and its numbers."""
    subject = f"{model} ({report['model_type']}) in {report['dtype']} on {allocation}"
    if report["is_equal"]:
        out.print(
            styled("[bold green]Equal:[/bold green] {} trains on the log-probs of its own forward.", subject)
        )
    else:
        out.print(
            styled("[bold red]Different:[/bold red] {} would train on other log-probs than its own.", subject)
        )
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in facts(report):
        table.add_row(name, text)
    out.print(table)


def facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the report: name and text."""
    lengths = ", ".join(map(str, report["lengths"]))
    rows = "packed" if report["packs_rows"] else "computed one at a time"
    found = [
        ("rows", f"{rows}; of {lengths} tokens"),
        ("largest difference", f"{format_number(report['difference'])} nats"),
        ("tolerance", f"{format_number(report['tolerance'])} nats, of rounding in {report['dtype']}"),
    ]
    if report["reason"] is not None:
        found.append(("reason", str(report["reason"])))
    if not report["packs_rows"] and report["packed_difference"] is not None:
        found.append(("packed rows", f"would differ by {format_number(report['packed_difference'])} nats"))
    found += [("not checked", text) for text in report["unchecked"]]
    times = f"{format_seconds(report['check_s'])}, after {format_seconds(report['load_s'])} of loading"
    return [*found, ("time", times)]
