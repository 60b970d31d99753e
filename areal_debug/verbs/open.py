"""`areal-debug open`: find what a run left, and show it in one workbench of pages."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_debug.cli import Verb, force_option, json_option, output_option
from areal_debug.confined import ANYWHERE, reads_untrusted
from areal_debug.render import console, errors_as_sentences, fail, print_json, refuse_existing

if TYPE_CHECKING:
    from areal_debug.open.items import Item

CPU_S = 60.0  # an icicle plot or a long record costs more than its bytes


@click.command(cls=Verb, example="areal-debug open runs\nareal-debug open runs -o workbench")
@click.argument("run", type=click.Path(path_type=Path))
@output_option("New folder for the pages; without it, they are served on this machine.")
@force_option
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the server; by default any free one.")  # fmt: skip
@json_option
@errors_as_sentences
def command(run: Path, output: Path | None, force: bool, port: int, as_json: bool) -> None:
    """Find what a run left below the folder RUN, and show it in one workbench of pages: records,
    metrics, hangs, traces, inference servers, checkpoints, reports.

    Without -o the pages are served at 127.0.0.1 and written again when they are loaded after the
    run has changed. With --json and without -o, what was found is listed.
    """
    if output is not None:
        refuse_existing(output, force)
        refuse_inside(run, output)
    if not run.exists():
        fail(f"{run} does not exist: give the folder of a run, or a record")
    if output is None and not as_json:
        from areal_debug.open.served import serve_workbench

        serve_workbench(run, port)
        return
    with tempfile.TemporaryDirectory(prefix="areal-debug-") as scratch:
        places = [Path(scratch) / "traces", *([output] if output else [])]
        write(run=run, output=output, places=places, as_json=as_json)


def refuse_inside(run: Path, output: Path) -> None:
    """Raise ValueError for an output below the run: the next search would find its pages."""
    if output.resolve().is_relative_to(run.resolve()):
        raise ValueError(f"{output} is inside of {run}: give --output a folder elsewhere")


@reads_untrusted("run", outputs="places", reads=ANYWHERE, cpu_s=CPU_S)
@errors_as_sentences
def write(run: Path, output: Path | None, places: Sequence[Path], as_json: bool) -> None:
    """Read the run, and write or list what was found, in a confined child.

    `places` are what the child may write: a scratch folder, and the output.
    """
    from areal_core.safety.scratch import unfinished_folder
    from areal_debug.open.find import find
    from areal_debug.open.workbench import read_all, write_workbench
    from areal_debug.render import with_progress

    found, note = find(run)
    if not found:
        fail(f"{run} holds nothing that a run leaves: no record, metrics, trace, stacks or checkpoint")
    items = with_progress("reading", len(found), lambda tick: read_all(found, places[0], tick))
    if output is not None:
        with unfinished_folder(output) as folder:
            write_workbench(run, items, folder, note)
    show_found(run, items, output, note, as_json)


def show_found(run: Path, items: "Sequence[Item]", output: Path | None, note: str, as_json: bool) -> None:
    from areal_debug.open.workbench import worst_verdict
    from areal_debug.report.frame import tone_of
    from areal_debug.report.model import Cell, Report, Table
    from areal_debug.report.terminal import print_report

    verdict = worst_verdict(items)
    if as_json:
        found = [document_of(item) for item in items]
        facts = {"run": str(run), "verdict": verdict, "found": found, "note": note}
        print_json(facts | {"output": output and str(output)})
        return
    rows = [
        (Cell(item.verdict or "-", tone_of(item.verdict)), item.found.kind, item.found.name, item.summary)
        for item in items
    ]
    page = "" if output is None else f"; open {output / 'index.html'} in a browser"
    table = Table(("verdict", "kind", "name", "summary"), rows)
    report = Report(str(run), f"{len(items)} found{page}", tone_of(verdict), [table], [note] if note else [])
    print_report(console(), report)


def document_of(item: "Item") -> dict[str, object]:
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
