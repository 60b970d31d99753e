"""Answer a query by DuckDB, in memory: it can read no file, load no extension and set no option.

DuckDB has the one thread that asks. A thread of its own would call the tables, which are Python,
with a lock of its stream held, and wait for the interpreter's, whose holder waits for the stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import duckdb

from areal_debug.query.tables import Tables
from recorder.confine import MEMORY_VARIABLE
from recorder.reader import Damage, Record

if TYPE_CHECKING:
    import pyarrow

# the last one keeps a query from undoing those before it
SETTINGS = (
    "set enable_external_access = false",
    "set autoload_known_extensions = false",
    "set autoinstall_known_extensions = false",
    "set allow_community_extensions = false",
    "set python_enable_replacements = false",
    "set lock_configuration = true",
)
HINT = "tables are steps, samples, tokens, outcomes, calls and tool_calls; --schema lists their columns"


@dataclass(frozen=True)
class TableColumns:
    """A table, and the types of its columns by name."""

    table: str
    columns: dict[str, str]


class Database:
    """The tables of a record in a database of this process.

    Args:
        memory_bytes: what the database may use; a query that needs more fails.
        damage: gets what is left out of the answers: steps of which a file is damaged. None: damage
            is an error.
    """

    def __init__(self, record: Record, memory_bytes: int, damage: Damage | None = None) -> None:
        self.tables = Tables(record, damage)
        config: dict[str, str | bool | int | float | list[str]] = {
            "threads": 1,
            "memory_limit": f"{memory_bytes // 2**20}MiB",
            "temp_directory": "",  # else a query that needs more writes into the working directory
        }
        self.connection = duckdb.connect(":memory:", config=config)
        for name, table in self.tables.all().items():
            self.connection.register(name, table)
        for setting in SETTINGS:
            self.connection.execute(setting)

    def columns(self) -> list[TableColumns]:
        return [
            TableColumns(
                name, {row[0]: row[1] for row in self.connection.execute(f"describe {name}").fetchall()}
            )
            for name in self.tables.all()
        ]

    def query(self, sql: str, limit: int | None = None) -> "Answer":
        """Start a query that returns at most `limit` rows.

        Raises ValueError for one that is wrong, and what reading the record raises.
        """
        with self.sentences():
            statements = self.connection.extract_statements(sql)
            kinds = [statement.type.name for statement in statements]
            if len(kinds) != 1 or kinds[0] not in ("SELECT", "EXPLAIN"):
                raise ValueError(f"give one query that only reads, such as SELECT: {HINT}")
            relation = self.connection.sql(sql)
            if limit is not None and kinds == ["SELECT"]:
                relation = relation.limit(limit)
            return Answer(self, relation, list(relation.columns))

    @contextmanager
    def sentences(self) -> Iterator[None]:
        """Raise an error of DuckDB as ValueError, or as what reading the record raised."""
        try:
            yield
        except duckdb.Error as error:
            if self.tables.failures:
                raise self.tables.failures[0] from None
            sentence = " ".join(str(error).partition("\nLINE ")[0].split())
            if isinstance(error, duckdb.OutOfMemoryException):
                raise ValueError(f"{sentence}: set {MEMORY_VARIABLE} to allow more") from None
            raise ValueError(f"{sentence} ({HINT})") from None


@dataclass(frozen=True)
class Answer:
    """The rows of a query, computed while they are read. Its methods raise what `query` raises."""

    database: Database
    relation: Any
    names: list[str]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows. Sums of integers, which Arrow lacks a type for, are decimals."""
        with self.database.sentences():
            for batch in self.batches():
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def batches(self) -> "pyarrow.RecordBatchReader":
        """Return a reader of the rows as they are computed."""
        import pyarrow

        return pyarrow.RecordBatchReader.from_stream(self.relation)

    def write_parquet(self, file: IO[bytes]) -> None:
        from pyarrow import parquet

        with self.database.sentences():
            reader = self.batches()
            with parquet.ParquetWriter(file, reader.schema, compression="zstd") as out:
                for batch in reader:
                    out.write_batch(batch)
