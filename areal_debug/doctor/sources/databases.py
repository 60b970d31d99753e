"""Read the runs of a Trackio project, from its database or from the parquet that it exports, and
those of MLflow's database.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from areal_debug.doctor.sources.plain_files import Row, UnreadableRun, parse_json

COLUMNS = "SELECT name FROM pragma_table_info('metrics')"
RUN_NAME = "run_name"  # column of Trackio, in its parquet as well
RUN_ID = "run_uuid"  # column of MLflow
# By that column: the names of the runs, the last one written first, and what one of them wrote.
NAMES = {
    RUN_NAME: "SELECT run_name FROM metrics GROUP BY run_name ORDER BY max(id) DESC",
    RUN_ID: """
        SELECT runs.name || '-' || run_uuid FROM metrics JOIN runs USING (run_uuid)
        GROUP BY run_uuid ORDER BY max(timestamp) DESC""",
}
ROWS = {
    RUN_NAME: "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id",
    RUN_ID: """
        SELECT step, json_object(key, CASE is_nan WHEN 1 THEN 'NaN' ELSE value END) FROM metrics
        WHERE run_uuid = substr(?, -32) ORDER BY timestamp""",
}


@contextmanager
def opened(file: Path) -> Iterator[tuple[sqlite3.Connection, str]]:
    """Open a database for reading, with its column of runs. Raises UnreadableRun for one of neither."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(file.absolute()))}?mode=ro", uri=True)) as database:
            database.execute("PRAGMA trusted_schema = OFF")
            columns = {name for (name,) in database.execute(COLUMNS)}
            known = [column for column in NAMES if column in columns]
            if not known:
                raise UnreadableRun(
                    f"{file} has no table metrics with runs: is it a project of Trackio, or MLflow's?"
                )
            yield database, known[0]
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise UnreadableRun(f"{file} cannot be read as a project of Trackio or MLflow: {error}") from error


def runs_of_project(file: Path) -> tuple[str, ...]:
    """Return the names of the runs, the last one written first. Raises UnreadableRun."""
    with opened(file) as (database, column):
        return tuple(str(name) for (name,) in database.execute(NAMES[column]))


def read_project(file: Path, run: str = "") -> Iterable[Row]:
    """Yield the rows of one run. Raises UnreadableRun."""
    with opened(file) as (database, column):
        for step, metrics in database.execute(ROWS[column], (run,)):
            text = metrics.decode(errors="replace") if isinstance(metrics, bytes) else str(metrics)
            row = parse_json(text, f"{file}, step {step}")
            if isinstance(row, dict):
                yield {**row, "_step": step}


def runs_of_parquet(file: Path) -> tuple[str, ...]:
    """Return the names of the runs in a parquet, "" without names. Raises UnreadableRun."""
    rows = rows_of_parquet(file)
    return tuple(dict.fromkeys(str(row[RUN_NAME]) for row in reversed(rows) if RUN_NAME in row)) or ("",)


def read_parquet(file: Path, run: str = "") -> Iterable[Row]:
    """Yield the rows of one run, or of all without a name. Raises UnreadableRun."""
    for row in rows_of_parquet(file):
        if not run or str(row.get(RUN_NAME)) == run:
            known = {name: value for name, value in row.items() if value is not None}
            packed = known.get("metrics")
            yield {**known, "metrics": parse_json(packed, str(file))} if isinstance(packed, str) else known


def has_runs(file: Path) -> bool:
    """Return whether a parquet has the columns of runs, and is no data set."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return False
    try:
        return {RUN_NAME, "step"} <= set(parquet.read_schema(file).names)
    except (pyarrow.ArrowException, OSError):
        return False


def rows_of_parquet(file: Path) -> list[dict[str, object]]:
    """Read a parquet. Raises UnreadableRun, and ModuleNotFoundError without pyarrow."""
    import pyarrow
    from pyarrow import parquet

    try:
        rows: list[dict[str, object]] = parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UnreadableRun(f"{file} is no parquet: {error}") from error
    return rows
