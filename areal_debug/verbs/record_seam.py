"""`areal-debug record seam` and `coverage`: what a resume changed, what of the data was trained on."""

from pathlib import Path

import click

from areal_debug.cli import Verb, json_option
from areal_debug.confined import ANYWHERE, reads_untrusted
from areal_debug.render import console, errors_as_sentences, print_json


@click.command(
    cls=Verb,
    short_help="Which rows of a data set were trained on: never, twice",
    example="areal-debug record coverage runs/record train.jsonl",
)
@click.argument("record", type=click.Path(path_type=Path))
@click.argument("data")
@json_option
@errors_as_sentences
def coverage(record: Path, data: str, as_json: bool) -> None:
    """Compare the prompts of RECORD with the rows of DATA, a JSONL file or dataset in the order in
    which the run read it: rows lost on the way, rows trained on twice, groups of another size.

    Exit code 0: every row that was read was trained on. 1: rows are missing, doubled, or groups are
    incomplete. 2: the order of the data is not known.
    """
    from areal_debug.agent.engine import read_rows
    from areal_debug.record.coverage import coverage_of, document_of, report_of
    from areal_debug.report.terminal import print_report
    from recorder import open_record

    found = coverage_of(open_record(record), read_rows(data))
    if as_json:
        print_json(document_of(found))
    else:
        print_report(console(), report_of(found))
    raise SystemExit({"complete": 0, "incomplete": 1, "unknown": 2}[found.verdict])
