"""Parquet: one sample per row, a list per token column, and a checksum per page.

Row groups are small, so that a viewer can read a single sample.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from areal_core.safety.durable import replacing
from recorder.exporters.jsonl import document_of
from recorder.exporters.rows import check_file, read_rows
from recorder.reader import Record

ROW_GROUP = 64


def write(record: Record, file: Path, steps: Sequence[int], overwrite: bool) -> list[Path]:
    """Write one file with all steps, atomically."""
    import pyarrow
    from pyarrow import parquet

    check_file(file, overwrite)
    columns = {
        "step": pyarrow.int64(),
        "prompt_id": pyarrow.int64(),
        "sample_id": pyarrow.int32(),
        "token_ids": pyarrow.list_(pyarrow.int32()),
        "prompt_len": pyarrow.int32(),
        "loss_mask": pyarrow.list_(pyarrow.int8()),
        "logprobs": pyarrow.list_(pyarrow.float32()),
        "reward": pyarrow.float32(),
        "finish_reason": pyarrow.int32(),
        "versions": pyarrow.list_(pyarrow.int32()),
        "prompt": pyarrow.string(),
        "completion": pyarrow.string(),
    }
    schema = pyarrow.schema(list(columns.items()))
    with (
        replacing(file) as bytes_out,
        parquet.ParquetWriter(bytes_out, schema, compression="zstd", write_page_checksum=True) as out,
    ):
        rows = read_rows(record, steps)
        while group := list(islice(rows, ROW_GROUP)):
            documents = [{"prompt": None, "completion": None} | document_of(row) for row in group]
            out.write_table(pyarrow.Table.from_pylist(documents, schema))
    return [file]
