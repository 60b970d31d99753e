"""`areal-debug query`: ask records in SQL, without export."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_debug.cli import Verb, force_option, json_option, output_option
from areal_debug.confined import describes_limits, reads_untrusted
from areal_debug.query import render
from areal_debug.render import announce, console, end_if_damaged, print_json, refuse_existing, styled
from areal_debug.report.terminal import print_report

if TYPE_CHECKING:
    from areal_debug.query.database import Answer

CPU_S = 60
SHARE_OF_MEMORY = 0.6  # for the database; Python, Arrow and the tensors that are read have the rest


@click.command(
    cls=Verb,
    example="areal-debug query runs/record 'select step, avg(reward) from samples group by step order by step'\n"
    "areal-debug query runs/record --schema",
)
@click.argument("words", type=click.Path(), nargs=-1, required=True, metavar="RECORD [SQL]")
@click.option("--schema", "shows_schema", is_flag=True, help="List the tables and their columns.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Rows; by default all, and {render.SHOWN} of a table that is printed.",
)
@click.option(
    "--csv",
    "as_csv",
    is_flag=True,
    help="Print CSV. Text that a spreadsheet would compute has a ' before it.",
)
@output_option("Write the rows into a file: .parquet, .csv, .json or .jsonl.")
@force_option
@json_option
@describes_limits(CPU_S)
def command(
    words: tuple[str, ...],
    shows_schema: bool,
    limit: int | None,
    as_csv: bool,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Answer a query over RECORD: SQL of DuckDB over the tables steps, samples, tokens,
    outcomes, calls and tool_calls.

    Only the columns and steps that it needs are read. It can read no file and change nothing.
    """
    if len(words) != 2 - shows_schema or as_csv + as_json + (output is not None) > 1:
        raise ValueError("give RECORD and a query or --schema, and at most one of --csv, --json and --output")
    if output is not None:
        render.check_output(output)
        refuse_existing(output, force)
    sql = None if shows_schema else words[1]
    ask(record=Path(words[0]), sql=sql, limit=limit, as_csv=as_csv, output=output, as_json=as_json)


@reads_untrusted("record", outputs="output", cpu_s=CPU_S)
def ask(
    record: Path, sql: str | None, limit: int | None, as_csv: bool, output: Path | None, as_json: bool
) -> None:
    """Answer a query over a record, or list its tables, in a confined child."""
    from areal_debug.query.database import Database
    from recorder import open_record
    from recorder.confine import bounds_for
    from recorder.reader import Damage

    announce(f"asking {record}")
    memory_bytes = bounds_for([record]).memory_bytes
    damage = Damage()
    database = Database(open_record(record, damage), int(SHARE_OF_MEMORY * memory_bytes), damage)
    if sql is None:
        tables = database.columns()
        if as_json:
            print_json([asdict(table) for table in tables])
        else:
            render.print_schema(tables)
        end_if_damaged(damage.found)
        return
    prints_table = not (as_csv or as_json or output)
    shown = render.SHOWN if limit is None else limit
    answer = database.query(sql, shown + 1 if prints_table else limit)
    if as_json:
        sys.stdout.writelines(render.json_list(answer))
    else:
        show(answer, shown, as_csv, output)
    end_if_damaged(damage.found)


def show(answer: "Answer", shown: int, as_csv: bool, output: Path | None) -> None:
    """Write the rows into a file, or print them as CSV or as a table of the first ones."""
    if output is not None:
        render.write(answer, output)
        console().print(styled("written: {}", output))
    elif as_csv:
        render.write_csv(answer, sys.stdout)
    else:
        print_report(console(), render.report_of_rows(answer, shown))
