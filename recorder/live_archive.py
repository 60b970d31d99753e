"""Records straight into an archive: each step moves into the zarr store as soon as all ranks have written it.

    ranks         step ─> files in a staging folder ─ fsync ─> step.json
    rank 0 then   step.json ─> shards of this step alone ─ fsync ─> group of the step, the commit ─> staged files removed

A shard is never written twice, so a run that is killed leaves the steps that it committed and nothing of the one after. Until its group is
there, a step is in the staging folder only and not part of the archive. Readers may open the archive while the run goes on.
"""

import shutil
from pathlib import Path

import zarr

from recorder.archive import (
    ARCHIVE_VERSION,
    LAYOUT_ATTRIBUTE,
    VERSION_ATTRIBUTE,
    Layout,
    layout_bytes,
    open_store,
)
from recorder.archive_writer import (
    DOCUMENTS,
    clear_destination,
    commit_layout,
    folder_layout,
    step_layout,
    top_layout,
)
from recorder.errors import RecordError
from recorder.format import ANCHORS_FOLDER, STEPS_FOLDER, step_name
from recorder.lane import Lane
from recorder.reader import open_record
from recorder.retention import Retention
from recorder.sealed import sync
from recorder.storage import is_url

LEVEL = 3  # of zstd: a run has no time for 9


class LiveArchive:
    """The archive at `location` of what rank 0 finds in the staging folder; used by one thread at a time.

    Raises RecordExists when something is at the location (unless `overwrite`), and RecordError for a zip file, which is written at once,
    and for limits, which would remove steps.
    """

    def __init__(
        self, staging: Path, location: str, overwrite: bool = False, retention: Retention | None = None
    ) -> None:
        self.staging, self.location = staging, location
        if location.endswith(".zip"):
            raise RecordError(
                f"{location}: a zip file is written at once; record into a folder or .zarr, then `areal-debug record archive`"
            )
        limits = retention or Retention()
        if (limits.keep_last, limits.max_bytes) != (None, None):
            raise RecordError(
                "steps of an archive are never removed: take debug.max_keep and debug.max_size_gb away"
            )
        clear_destination(location, overwrite)
        self.anchors: set[str] = set()

    def begin(self) -> None:
        """Makes the archive of a record without steps; the staging folder holds its record.json."""
        if not is_url(self.location):
            Path(self.location).mkdir(parents=True, exist_ok=True)
        self.group = zarr.create_group(open_store(self.location, read_only=False))
        self.lane = Lane(self.group, "all", packed=False, level=LEVEL)
        self.write_top()

    def take(self, step: int) -> None:
        """Moves a step that is committed in the staging folder, and anchors that are finished, into the archive."""
        record = open_record(self.staging)
        for anchor in record.anchors():
            folder = f"{ANCHORS_FOLDER}/{step_name(anchor)}"
            if folder not in self.anchors:  # recovery may offer the same checkpoint again
                self.commit(folder, folder_layout(self.lane, record, folder))
                self.anchors.add(folder)
            shutil.rmtree(self.staging / folder)
        folder = f"{STEPS_FOLDER}/{step_name(step)}"
        self.commit(folder, step_layout(self.lane, record, step))
        shutil.rmtree(self.staging / folder)

    def commit(self, folder: str, layout: Layout) -> None:
        """Makes what was appended a part of the archive."""
        where = self.lane.append(DOCUMENTS, "U8", layout_bytes(layout))
        self.sync_objects()
        commit_layout(self.group, folder, where)
        if not is_url(self.location):
            sync(Path(self.location) / folder / "zarr.json")
            sync((Path(self.location) / folder).parent)

    def end(self) -> None:
        """Takes the files at the top as they are now, cuts the arrays to their length, removes the staging folder."""
        self.write_top()
        self.lane.close()
        self.sync_objects()
        shutil.rmtree(self.staging)

    def write_top(self) -> None:
        """The files at the top of the record, such as record.json."""
        record = open_record(self.staging)
        where = self.lane.append(DOCUMENTS, "U8", layout_bytes(top_layout(self.lane, record.storage)))
        self.sync_objects()
        self.group.attrs.update(
            {VERSION_ATTRIBUTE: ARCHIVE_VERSION, LAYOUT_ATTRIBUTE: list(vars(where).values())}
        )

    def sync_objects(self) -> None:
        """Waits until the disk has every object that was written since the last call."""
        if not is_url(self.location):
            for name in sorted(self.lane.written):
                path = Path(self.location) / name
                if path.exists():  # shards of zeros are not stored
                    sync(path)
        self.lane.written.clear()
