"""Record into an archive: a step moves into the zarr store when all ranks have written it.

    ranks         step ─> files in a staging folder ─ fsync ─> step.json
    rank 0 then   step.json ─> shards of this step alone ─ fsync ─> group of the step, the commit ─> staged files removed

A shard is never rewritten, so a run that is killed leaves its committed steps and nothing of the
next one. Before its group exists, a step is in the staging folder only and not part of the archive.
Readers may open the archive while the run continues.
"""

import shutil
from functools import cached_property
from pathlib import Path

from areal_core.safety.durable import sync
from recorder.archive.array_streams import ArrayStream, create_group
from recorder.archive.pack import (
    DOCUMENTS,
    anchor_layout,
    clear_destination,
    commit_layout,
    commit_top,
    step_layout,
    top_layout,
)
from recorder.archive_storage import Layout, layout_bytes
from recorder.errors import RecordError
from recorder.format import ANCHORS_FOLDER, STEP_FILE, STEPS_FOLDER, step_name
from recorder.header import clear_record
from recorder.pictures.named import picture_file
from recorder.reader import open_record
from recorder.resume import remove_committed
from recorder.retention import Retention
from recorder.storage import is_url

LEVEL = 3  # of zstd: 9 is too slow during a run


class LiveArchive:
    """The archive at `location` of the staging folder's steps; used by one thread at a time.

    Raises RecordExists if the location is not empty (unless `overwrite`), and RecordError for a zip
    file, which cannot be appended to, and for limits, which would remove steps.
    """

    def __init__(
        self, staging: Path, location: str, overwrite: bool = False, retention: Retention | None = None
    ) -> None:
        self.staging, self.location = staging, location
        if location.endswith(".zip"):
            raise RecordError(
                f"{location}: a zip file cannot be appended to: record into a folder or .zarr, then `areal-debug record archive`"
            )
        limits = retention or Retention()
        if (limits.keep_last, limits.max_bytes) != (None, None):
            raise RecordError(
                "steps of an archive are never removed: remove debug.max_keep and debug.max_size_gb"
            )
        self.overwrite = overwrite
        if not overwrite:
            clear_destination(location, overwrite)
        self.anchors: set[str] = set()

    @cached_property
    def pictures(self) -> Layout:
        """The parts of the pictures that are in the archive."""
        return {}

    def begin(self) -> None:
        """Create the archive of a record without steps, from record.json in the staging folder.

        The caller holds the lock of the staging folder: an earlier archive may be replaced now.
        """
        clear_destination(self.location, self.overwrite)
        if not is_url(self.location):
            Path(self.location).mkdir(parents=True, exist_ok=True)
        self.group = create_group(self.location)
        self.stream = ArrayStream(self.group, "all", packed=False, level=LEVEL)
        self.write_top()

    def move_step(self, step: int) -> None:
        """Move a committed step, and finished anchors, from the staging folder into the archive."""
        record = open_record(self.staging)
        for anchor in record.anchors():
            folder = f"{ANCHORS_FOLDER}/{step_name(anchor)}"
            if folder not in self.anchors:  # recovery may save the same checkpoint again
                self.commit(folder, anchor_layout(self.stream, record, anchor))
                self.anchors.add(folder)
            shutil.rmtree(self.staging / folder)
        folder = f"{STEPS_FOLDER}/{step_name(step)}"
        self.commit(folder, step_layout(self.stream, record, step, self.pictures))
        pictures = record.step(step).named_pictures()
        remove_committed(self.staging / folder, STEP_FILE)
        for name in pictures:  # a rank that needs it for a later step may write it again
            (self.staging / picture_file(name)).unlink(missing_ok=True)

    def commit(self, folder: str, layout: Layout) -> None:
        """Commit the appended parts as a step or anchor of the archive."""
        where = self.stream.append(DOCUMENTS, "U8", layout_bytes(layout))
        self.sync_objects()
        commit_layout(self.group, folder, where)
        self.stream.written.add(f"{folder}/zarr.json")
        self.sync_objects()

    def end(self) -> None:
        """Archive the files at the top, truncate the arrays, empty the staging folder."""
        self.write_top()
        self.stream.close()
        self.sync_objects()
        clear_record(self.staging)

    def write_top(self) -> None:
        record = open_record(self.staging)
        where = self.stream.append(DOCUMENTS, "U8", layout_bytes(top_layout(self.stream, record.storage)))
        self.sync_objects()
        commit_top(self.group, where)

    def sync_objects(self) -> None:
        """Fsync every object that was written since the last call, and the folders above it."""
        if not is_url(self.location):
            top = Path(self.location)
            paths = [top / name for name in sorted(self.stream.written)]
            paths = [path for path in paths if path.exists()]  # shards of zeros are not stored
            above = {folder for path in paths for folder in path.parents if folder not in top.parents}
            for path in (*paths, *sorted(above)):
                sync(path)
        self.stream.written.clear()
