"""A `datasets.Dataset` in a folder, as its `save_to_disk` writes it; `load_from_disk` opens it.

The package itself is not needed: it imports slowly and writes temporary files, which the confined
process that reads a record cannot.
"""

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_core.safety.scratch import unfinished_folder
from recorder.exporters.arrow import batches, schema_of
from recorder.exporters.rows import check_folder, layout_of_steps
from recorder.reader import Record

DATA_FILE, STATE_FILE, INFO_FILE = "data-00000-of-00001.arrow", "state.json", "dataset_info.json"


def write(
    record: Record, folder: Path, steps: Sequence[int], overwrite: bool, pictures: Path | None = None
) -> list[Path]:
    """Write one dataset with all steps, atomically."""
    import pyarrow

    check_folder(folder, overwrite, lambda place: (place / STATE_FILE).is_file())
    layout = layout_of_steps(record, steps, pictures)
    state: dict[str, Any] = {
        "_data_files": [{"filename": DATA_FILE}],
        "_fingerprint": secrets.token_hex(8),  # names what is computed from the dataset, in a cache
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    with unfinished_folder(folder) as content:
        content.mkdir()
        schema = schema_of(layout.fields)
        with (content / DATA_FILE).open("wb") as file, pyarrow.ipc.new_stream(file, schema) as out:
            for batch in batches(record, steps, layout):
                out.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        (content / STATE_FILE).write_text(json.dumps(state))
        (content / INFO_FILE).write_text("{}")  # columns and types are those of the file
    return [folder]
