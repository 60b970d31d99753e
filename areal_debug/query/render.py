"""Rows of a query as a table on a terminal, CSV, JSON or a file."""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from areal_core.safety.durable import replacing
from areal_debug.render import console, count, format_number, styled
from areal_debug.report.model import Report, Table
from recorder.documents import plain

if TYPE_CHECKING:
    from areal_debug.query.database import Answer, TableColumns

SHOWN = 40  # rows
LONGEST_CELL = 120  # characters of a value in a table on a terminal
COMPUTED = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet computes text that begins so
ENDINGS = (".parquet", ".csv", ".json", ".jsonl")


def print_schema(tables: Iterable["TableColumns"]) -> None:
    out = console()
    for table in tables:
        out.print(styled("[bold]{}[/bold]", table.table))
        for name, kind in table.columns.items():
            out.print(styled("  {:<16} [dim]{}[/dim]", name, kind))


def report_of_rows(answer: "Answer", shown: int) -> Report:
    """Return the first rows; `answer` has one more if there are more."""
    rows = list(answer.rows())
    headings = [
        name + ">" * any(isinstance(row[number], int | float | Decimal) for row in rows)
        for number, name in enumerate(answer.names)
    ]
    more = ", the first of more: --limit N prints N of them" if len(rows) > shown else ""
    table = Table(headings, [list(map(cell_text, row)) for row in rows[:shown]])
    return Report(f"{count(min(len(rows), shown), 'row')}{more}", "", "dim", [table])


def cell_text(value: Any) -> str:
    if value is None:
        return "null"
    text = format_number(value) if isinstance(value, float) else text_of(value)
    return text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL]}..."


def text_of(value: Any) -> str:
    """Return a value as text; lists and structs as JSON."""
    return json_of(value) if isinstance(value, list | dict) else str(value)


def json_of(value: Any) -> str:
    """Return a value as JSON; dates as text."""
    return json.dumps(plain(value), allow_nan=False, default=number_or_text)


def number_or_text(value: Any) -> int | float | str:
    if isinstance(value, Decimal):
        return int(value) if value.as_tuple().exponent == 0 else float(value)
    return str(value)


def csv_cell(value: Any) -> Any:
    """Return a value for CSV: null is empty, and no text is a formula."""
    if value is None or isinstance(value, int | float | Decimal):
        return value
    text = text_of(value)
    return f"'{text}" if text.startswith(COMPUTED) else text


def write_csv(answer: "Answer", out: IO[str]) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(csv_cell, answer.names))
    writer.writerows(map(csv_cell, row) for row in answer.rows())


def json_lines(answer: "Answer") -> Iterator[str]:
    """Yield each row as a JSON object."""
    return (json_of(dict(zip(answer.names, row, strict=True))) for row in answer.rows())


def json_list(answer: "Answer") -> Iterator[str]:
    before = "["
    for line in json_lines(answer):
        yield f"{before}\n{line}"
        before = ","
    yield "[]\n" if before == "[" else "\n]\n"


def check_output(file: Path) -> None:
    """Raise ValueError unless the name says which format to write."""
    if file.suffix not in ENDINGS:
        raise ValueError(f"{file} ends in none of {', '.join(ENDINGS)}: the ending chooses the format")


def write(answer: "Answer", file: Path) -> None:
    """Write the rows into a file, atomically, as its ending says."""
    with replacing(file) as out:
        if file.suffix == ".parquet":
            answer.write_parquet(out)
        elif file.suffix == ".csv":
            text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
            write_csv(answer, text)
            text.detach()  # which would close the file
        else:
            is_list = file.suffix == ".json"
            pieces = json_list(answer) if is_list else (f"{line}\n" for line in json_lines(answer))
            out.writelines(piece.encode() for piece in pieces)
