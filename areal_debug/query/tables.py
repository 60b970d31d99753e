"""A record as six tables that are read when a query needs them, and no further than it needs.

    DuckDB ── columns, filter ──> LazyTable ── for each step ──> the tensors of these columns
                                     └ a step of which the filter keeps no row: only what it tests

`steps` has a row per step, `samples` one per sample, `tokens` one per token, `outcomes` one per
statistic of a step and number of a micro-batch, `calls` one per call of an agent's episode, and
`tool_calls` one per tool call in the answer of such a call.
"""

import json
import tomllib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import dataset

from recorder.reader import Damage, Record, RecordedStep, mean_reward, read_manifest
from recorder.tables.arrow import array_of, batch_of, number_array, schema_of, type_of
from recorder.tables.columns import Field, Layout, has_file, layout_of, read_columns
from recorder.transcripts import Transcript, text_of, tool_uses

KEPT_MANIFESTS = 20_000  # parsed step.json files of one rank each, about 200 MB
TOKEN_NAMES = {"token_ids": "token_id", "logprobs": "logprob", "versions": "version"}
OF_TOKENS = ("step", "rank", "row", "prompt_id", "sample_id")  # columns of the sample that a token repeats
STEPS, OUTCOMES, CALLS, TOOL_CALLS = (
    pyarrow.schema({name: pyarrow.type_for_alias(kind) for name, kind in columns.items()})
    for columns in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).values()
)
Read = Callable[[int, Collection[str]], Iterator[pyarrow.RecordBatch]]
LeftOut = Callable[[], AbstractContextManager[None]]


class LazyTable(dataset.Dataset):  # type: ignore[misc]  # pyarrow has no types
    """A table of which `read(step, columns)` reads the rows of a step.

    DuckDB takes the columns and filters that it needs from any subclass of this class of pyarrow.
    """

    def __init__(
        self,
        schema: Callable[[], pyarrow.Schema],
        steps: Sequence[int],
        read: Read,
        failures: list[Exception],
        left_out: LeftOut,
    ) -> None:
        self._schema, self._steps, self._read = schema, steps, read
        self._failures, self._left_out = failures, left_out

    @property
    def schema(self) -> pyarrow.Schema:
        """Names and types of all columns."""
        return self._schema()

    def scanner(
        self, columns: Sequence[str] | None = None, filter: Any = None, **settings: Any
    ) -> "LazyScan":
        return LazyScan(self, self.schema.names if columns is None else list(columns), filter)

    def batches(self, columns: Sequence[str], filter: Any) -> Iterator[pyarrow.RecordBatch]:
        """Yield rows, step by step, without steps that are damaged.

        An error is kept in `failures`: DuckDB would keep its text.
        """
        text = "" if filter is None else str(filter)
        tested = [name for name in self.schema.names if name in text]  # perhaps too many
        needed = {*columns, *tested}
        try:
            for step in self._steps:
                of_step: list[pyarrow.RecordBatch] = []
                with self._left_out():
                    if filter is not None and len(tested) < len(needed):
                        kept = (batch.filter(filter).num_rows for batch in self._read(step, tested))
                        if not any(kept):
                            continue
                    of_step = list(self._read(step, needed))
                for batch in of_step:
                    yield (batch if filter is None else batch.filter(filter)).select(columns)
        except Exception as error:
            self._failures.append(error)
            raise


class LazyScan:
    """Some columns of the rows of a table that a filter keeps, as DuckDB asks for them."""

    def __init__(self, table: LazyTable, columns: Sequence[str], filter: Any) -> None:
        self.table, self.columns, self.filter = table, columns, filter

    def to_reader(self) -> pyarrow.RecordBatchReader:
        schema = pyarrow.schema([self.table.schema.field(name) for name in self.columns])
        return pyarrow.RecordBatchReader.from_batches(schema, self.table.batches(self.columns, self.filter))


class Tables:
    """The tables of a record; `failures` are the errors of reading it."""

    def __init__(self, record: Record, damage: Damage | None) -> None:
        self.record = record
        self.left_out: LeftOut = damage.left_out if damage else nullcontext
        self.failures: list[Exception] = []
        kept = max(1, KEPT_MANIFESTS // record.header.num_ranks)
        self.step = lru_cache(kept)(
            lambda number: RecordedStep(record.storage, read_manifest(record.storage, number))
        )

    @cached_property
    def layout(self) -> Layout:
        """The columns of samples, for which every step.json is read."""
        steps = []
        for number in self.record.steps:
            with self.left_out():
                steps.append(self.step(number))
        return layout_of(self.record, steps)

    @cached_property
    def token_fields(self) -> dict[str, Field]:
        fields = {field.name: field for field in self.layout.fields}
        tokens = {
            TOKEN_NAMES.get(name, name): field
            for name, field in fields.items()
            if field.is_list and field.source in ("batch", "learning")
        }
        return {name: fields[name] for name in OF_TOKENS} | tokens

    def all(self) -> dict[str, LazyTable]:
        schemas: dict[str, tuple[Callable[[], pyarrow.Schema], Read]] = {
            "steps": (lambda: STEPS, self.read_step),
            "samples": (lambda: schema_of(self.layout.fields), self.read_samples),
            "tokens": (self.schema_of_tokens, self.read_tokens),
            "outcomes": (lambda: OUTCOMES, self.read_outcomes),
            "calls": (lambda: CALLS, self.read_calls),
            "tool_calls": (lambda: TOOL_CALLS, self.read_tool_calls),
        }
        return {
            name: LazyTable(schema, self.record.steps, read, self.failures, self.left_out)
            for name, (schema, read) in schemas.items()
        }

    def read_step(self, number: int, names: Collection[str]) -> Iterator[pyarrow.RecordBatch]:
        """Yield the step's row of `steps`; rewards are read for their mean only."""
        manifest = self.step(number).manifest
        batches = [entry for name, entry in manifest.batches.items() if name.startswith("batch-")]
        row = {
            "step": number,
            "version": manifest.version,
            "num_ranks": manifest.num_ranks,
            "num_samples": sum(entry.num_rows for entry in batches),
            "num_tokens": sum(entry.num_tokens for entry in batches),
            "size_bytes": manifest.size_bytes,
            "mean_reward": mean_reward(self.step(number)) if "mean_reward" in names else None,
        }
        yield pyarrow.RecordBatch.from_pylist([row], STEPS)

    def read_samples(self, number: int, names: Collection[str]) -> Iterator[pyarrow.RecordBatch]:
        step = self.step(number)
        for rank in step.ranks:
            yield batch_of(step, rank, self.layout, names)

    def schema_of_tokens(self) -> pyarrow.Schema:
        """Return the columns of `tokens`, of which `position` counts from 0 in each sample."""
        columns = {
            name: type_of(field).value_type if field.is_list else type_of(field)
            for name, field in self.token_fields.items()
        }
        first = list(columns)[: len(OF_TOKENS)]
        named = {name: columns[name] for name in first} | {"position": pyarrow.int32()} | columns
        return pyarrow.schema(named)

    def read_tokens(self, number: int, names: Collection[str]) -> Iterator[pyarrow.RecordBatch]:
        """Yield the tokens of each rank. A sample that is text alone has none."""
        step, fields = self.step(number), self.token_fields
        schema = self.schema_of_tokens()
        chosen = [name for name in schema.names if name in names]
        for rank in step.ranks:
            bounds = step.batch(rank, ["cu_seqlens"])["cu_seqlens"]
            sample = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
            read = {fields[name].name for name in chosen if name in fields}
            columns = read_columns(step, rank, self.layout, read)
            arrays = []
            for name in chosen:
                if name == "position":
                    positions = np.arange(len(sample)) - bounds[:-1][sample]
                    arrays.append(number_array(positions.astype(np.int32)))
                    continue
                array = array_of(fields[name], columns[fields[name].name])
                if not fields[name].is_list:
                    arrays.append(array.take(number_array(sample)))
                else:
                    arrays.append(flattened(array, sample))
            yield pyarrow.RecordBatch.from_arrays(
                arrays, schema=pyarrow.schema([schema.field(name) for name in chosen])
            )

    def read_outcomes(self, number: int, names: Collection[str]) -> Iterator[pyarrow.RecordBatch]:
        """Yield the statistics of the step, then the numbers of each rank's micro-batches.

        A statistic is there once, and of a further rank only if it differs there.
        """
        step, rows = self.step(number), []
        first: dict[str, str] = {}
        for rank in step.ranks:
            if not has_file(step, "outcome", rank, "json"):
                continue
            outcome = step.outcome(rank)
            stats = outcome.stats.items()
            differing = {name: value for name, value in stats if first.get(name) != value.hex()}
            first = first or {name: value.hex() for name, value in stats}
            place = {"step": number, "rank": rank}
            rows += [place | {"name": name, "value": value} for name, value in differing.items()]
            for item in outcome.micro_batches:
                inner = place | {"minibatch": item.minibatch, "micro_batch": item.micro_batch}
                numbers = {"loss": item.loss, "weight": item.weight, "num_tokens": float(item.num_tokens)}
                rows += [inner | {"name": f"micro_batch/{n}", "value": v} for n, v in numbers.items()]
        yield pyarrow.RecordBatch.from_pylist(rows, OUTCOMES)

    def read_calls(self, number: int, names: Collection[str]) -> Iterator[pyarrow.RecordBatch]:
        """Yield the calls of the agents' episodes; `messages` are those that the call added."""
        rows = []
        for place, transcript in self.transcripts(number):
            facts: dict[str, Any] = place | {"agent": transcript.agent.name, "failure": transcript.failure}
            rows += [
                facts
                | {
                    "turn": call.turn,
                    "after": call.after,
                    "messages": json.dumps(call.messages, ensure_ascii=False),
                    "answer": text_of(call.answer),
                    "finish": call.finish,
                    "reward": call.reward,
                    "num_tool_calls": len(call.answer.get("tool_calls", ())),
                }
                for call in transcript.calls
            ]
        yield pyarrow.RecordBatch.from_pylist(rows, CALLS)

    def read_tool_calls(self, number: int, names: Collection[str]) -> Iterator[pyarrow.RecordBatch]:
        """Yield the tool calls of the agents' episodes; one without a result has null."""
        rows = []
        for place, transcript in self.transcripts(number):
            for use in tool_uses(transcript.calls):
                facts = {"arguments": use.arguments, "result": use.result, "failed": use.failed}
                rows.append(place | {"turn": use.turn, "tool": use.name} | facts)
        yield pyarrow.RecordBatch.from_pylist(rows, TOOL_CALLS)

    def transcripts(self, number: int) -> Iterator[tuple[dict[str, int], Transcript]]:
        """Yield each recorded episode of a step, and the columns that name it."""
        step = self.step(number)
        for rank in step.ranks:
            for one in step.calls(rank) or ():
                names = {"step": number, "rank": rank, "prompt_id": one.prompt_id, "episode": one.episode}
                yield names, one


def flattened(array: pyarrow.ListArray, sample: np.ndarray) -> pyarrow.Array:
    """Return the value of each token; null in a sample whose list is null."""
    if array.null_count == 0:
        return array.values
    if len(array.values) != len(sample):  # the step has no such column
        return pyarrow.nulls(len(sample), array.type.value_type)
    is_known = array.is_valid().take(number_array(sample))
    return pyarrow.compute.if_else(is_known, array.values, None)
