"""`areal-debug record seam` and `coverage`: what a resume changed, what was trained on."""

from dataclasses import asdict
from pathlib import Path

import click

from areal_debug.cli import Verb, json_option
from areal_debug.confined import ANYWHERE, reads_untrusted
from areal_debug.render import end_if_damaged


@click.command(
    cls=Verb,
    short_help="Which rows of a data set were trained on: never, twice",
    example="areal-debug record coverage runs/record train.jsonl",
)
@click.argument("record", type=click.Path(path_type=Path))
@click.argument("data")
@json_option
def coverage(record: Path, data: str, as_json: bool) -> None:
    """Compare the prompts of RECORD with the rows of DATA, a JSONL file or dataset in the order in
    which the run read it: rows lost on the way, rows trained on twice, groups of another size.

    Exit code 0: every row that was read was trained on. 1: rows are missing, doubled, or groups are
    incomplete. 2: the order of the data is not known.
    """
    from areal_core.data import rows_of
    from areal_debug.report.terminal import answer
    from areal_debug.resume.coverage import coverage_of, report_of
    from recorder import open_record

    found = coverage_of(open_record(record), rows_of(data))
    answer(asdict(found), report_of(found), as_json)


@click.command(
    cls=Verb,
    short_help="Say what a resume changed, state by state",
    example="areal-debug record seam runs/before runs/after\nareal-debug record seam runs/metrics.jsonl --at 200",
)
@click.argument("before", type=click.Path(path_type=Path, exists=True), metavar="A")
@click.argument("after", type=click.Path(path_type=Path, exists=True), required=False, metavar="[B]")
@click.option("--at", type=int, metavar="STEP", help="Where A alone resumed: the first step after it.")
@json_option
@reads_untrusted("before", "after", reads=ANYWHERE)
def seam(before: Path, after: Path | None, at: int | None, as_json: bool) -> None:
    """Compare the end of A with the beginning of B, the same run after a resume.

    Each is a record, a log, or a folder with both and with checkpoints; A alone has the resume
    inside.

    Every state that a resume carries over continues, changed, or is unobserved; then the report
    says what to record.

    Exit code 0: what is observed continues. 1: a state changed. 2: too little is observed.
    """
    from areal_debug.report.terminal import print_answer
    from areal_debug.resume.seam import cut, document_of, judge_seam, place_of_seam, read_segment, report_of

    if after is not None and at is not None:
        raise click.UsageError("--at is for A alone: leave it out, or B")
    whole = read_segment(before)
    sides = (
        (whole, read_segment(after))
        if after is not None
        else cut(whole, place_of_seam(whole) if at is None else at)
    )
    found = judge_seam(*sides)
    report = report_of(found)
    print_answer(document_of(found), report, as_json)
    end_if_damaged(sides[0].run.damage.found | sides[1].run.damage.found)
    raise SystemExit(report.exit_code)
