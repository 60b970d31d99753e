"""The page of a record's samples and tokens, inside a workbench."""

from collections.abc import Sequence
from pathlib import Path

from areal_debug.record.decode import load_decoder
from areal_debug.report.frame import Link
from recorder import Record


def write_tokens(record: Record, page: Path, links: Sequence[Link]) -> None:
    """Write the page of all steps; `page` is the index.html of a folder of its own."""
    from areal_debug.view.contents import Contents, Place
    from areal_debug.view.followed import FollowedRecord
    from areal_debug.view.page import write_folder

    contents = Contents(FollowedRecord(record.path, load_decoder(record), ()))
    document = contents.document(list(record.steps), Place(record.steps[-1]))
    write_folder(contents, document, page.parent, lambda step: None, links)
