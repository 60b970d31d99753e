"""`areal-debug crosscheck`: recompute a recorded step by a float64 twin, TRL's and verl's code."""

from typing import TYPE_CHECKING, NoReturn

import click

from areal_debug.cli import Verb, json_option, step_option
from areal_debug.render import announce
from areal_debug.report.model import Block, Facts, Report, Row, Table, rows_of, tone_of

if TYPE_CHECKING:
    from replayer.crosscheck.opinions import Crosscheck, RowDifference, StageOpinion

SHOWN_ROWS = 5
WORDS = {"equal": "Equal", "differs": "Different", "not checked": "Not checked"}


@click.command(
    cls=Verb,
    example="areal-debug crosscheck runs/record\nareal-debug crosscheck runs/record --with trl,verl,float64 --json\n"
    "areal-debug crosscheck runs/accumulation-1 --layout runs/accumulation-4",
)
@click.argument("record", type=click.Path())
@click.option(
    "--with",
    "opinions",
    default="float64",
    show_default=True,
    metavar="NAME,...",
    help="Who recomputes: float64 (this package), trl, verl (their own code, if installed).",
)
@step_option("the first")
@click.option("--model", type=click.Path(), help="Folder of the weights that the step starts from.")
@click.option(
    "--layout",
    type=click.Path(),
    metavar="RECORD",
    help="The same rows trained in another layout: ranks, accumulation, micro-batches; name the factor between them.",
)
@json_option
def command(
    record: str, opinions: str, step: int | None, model: str | None, layout: str | None, as_json: bool
) -> None:
    """Recompute the rewards, advantages, loss and gradient norm of a step of RECORD, and name the
    first stage, option and rows that differ.

    Exit code 0: equal within the rounding of float32. 1: they differ. 2: nothing could be checked.
    """
    announce(f"recomputing {'the first step' if step is None else f'step {step}'} of {record}")
    from areal_debug.report.terminal import answer
    from replayer.crosscheck.opinions import crosscheck, parse_opinions  # imports torch
    from replayer.crosscheck.step_rows import read_confined

    if layout is not None:
        compare(record, layout, step, as_json)
    names = parse_opinions(opinions)
    report = crosscheck(read_confined(record, step, model), names, model)
    answer(report.to_dict(), report_of(report), as_json)


def compare(record: str, layout: str, step: int | None, as_json: bool) -> NoReturn:
    """Report whether a step depends on its layout; ends the command."""
    from areal_debug.report.terminal import answer
    from replayer.crosscheck.layouts import compare_layouts
    from replayer.crosscheck.step_rows import read_confined

    found = compare_layouts(read_confined(record, step), read_confined(layout, step))
    cells = [[d.what, f"{d.one:.6g}", f"{d.other:.6g}", f"{d.ratio:.4g}", d.named] for d in found.differences]
    rows = [Row("layout", f"{name}: {one:g} and {other:g}") for name, (one, other) in found.layouts.items()]
    rows.append(Row("compared", ", ".join(found.compared)))
    blocks: list[Block] = [Table(("what", "first>", "second>", "ratio>", "factor"), cells), Facts(rows)]
    report = Report(WORDS[found.verdict], found.sentence, tone_of(found.verdict), blocks)
    answer(found.to_dict(), report, as_json)


def report_of(report: "Crosscheck") -> Report:
    """Return the verdict, the first difference, and every stage of every opinion."""
    rows: list[Row] = []
    if report.first is not None:
        opinion, stage = report.first
        sentence = f"step {report.step}, stage {stage.stage}, as recomputed by {opinion.name}."
        rows = [Row("option", stage.option or "unknown")]
        rows += rows_of("row", [line_of_row(row) for row in stage.rows[:SHOWN_ROWS]])
        if stage.num_rows > SHOWN_ROWS:
            rows.append(Row("", f"{stage.num_rows} rows in total", "dim"))
        refuted = "the step trained again with the options set equal, if that record still differs"
        rows.append(Row("refuted if", refuted, "dim"))
    elif report.verdict == "equal":
        found = [stage for opinion in report.opinions for stage in opinion.stages]
        equal = dict.fromkeys(stage.stage for stage in found if stage.verdict == "equal")
        left = dict.fromkeys(stage.stage for stage in found if stage.stage not in equal)
        rest = f"; not checked: {', '.join(left)}" if left else ""
        sentence = f"{', '.join(equal)} of step {report.step}, within the rounding of float32{rest}."
    else:
        sentence = f"nothing of step {report.step} could be recomputed."
    stages = [
        Facts([row for stage in opinion.stages for row in rows_of_stage(stage)], opinion.name)
        for opinion in report.opinions
    ]
    blocks = [Facts(rows), *stages, Facts(rows_of("note", report.notes))]
    return Report(WORDS[report.verdict], sentence, tone_of(report.verdict), blocks)


def line_of_row(row: "RowDifference") -> str:
    place = f"rank {row.rank}, row {row.row} (prompt {row.prompt_id}, sample {row.sample_id})"
    if row.token is not None:
        place += f", token {row.token}"
    if row.recorded is not None:
        place += f": {row.recorded:.9g} in the record, {row.recomputed:.9g} recomputed"
    return place


def rows_of_stage(stage: "StageOpinion") -> list[Row]:
    facts = [fact for fact in (stage.what, stage.option, stage.reason) if fact is not None]
    level = tone_of(stage.verdict) if stage.verdict != "not checked" else "dim"
    rows = [Row(stage.stage, f"{stage.verdict:<12}{': '.join(facts)}".rstrip(), level)]
    if stage.verdict == "differs" and stage.recorded is not None:
        values = f"{stage.recorded:.9g} in the record, {stage.recomputed:.9g} recomputed"
        rows.append(Row("", f"{values}; rounding allows {stage.allowed:.2g}"))
    return rows
