"""Print what a run left: a line for each thing, with its verdict."""

from collections.abc import Sequence
from pathlib import Path

from areal_debug.open.items import Item
from areal_debug.open.workbench import worst_verdict
from areal_debug.render import console, print_json, styled
from areal_debug.report.frame import tone_of

STYLES = {"good": "green", "bad": "red", "unsure": "yellow", "": "dim"}


def print_found(run: Path, items: Sequence[Item], output: Path | None, note: str, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "run": str(run),
                "verdict": worst_verdict(items),
                "found": [document_of(item) for item in items],
                "note": note,
                "output": output and str(output),
            }
        )
        return
    out = console()
    if output is not None:
        out.print(styled("{}: {} found; open {} in a browser", run, len(items), output / "index.html"))
    for item in items:
        verdict = styled(f"[{STYLES[tone_of(item.verdict)]}]{{}}[/]", f"{item.verdict or '-':<10}")
        out.print(
            styled("{}  {:<10}  {}  [dim]{}[/dim]", verdict, item.found.kind, item.found.name, item.summary)
        )
    if note:
        out.print(styled("[yellow]{}[/yellow]", note))


def document_of(item: Item) -> dict[str, object]:
    """Return an item as JSON types."""
    return {
        "kind": item.found.kind,
        "name": item.found.name,
        "path": str(item.found.path),
        "verb": item.found.verb,
        "verdict": item.verdict,
        "summary": item.summary,
        "page": item.page,
    }
