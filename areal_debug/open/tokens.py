"""The page of a record's samples and tokens, inside a workbench."""

from collections.abc import Sequence
from pathlib import Path

from areal_core.safety.html_page import Link
from areal_debug.record.decode import load_decoder
from recorder import Record


def write_tokens(record: Record, page: Path, links: Sequence[Link]) -> None:
    """Write the page of all steps; `page` is the index.html of a folder of its own."""
    from areal_debug.view.command import write_page

    page.parent.mkdir(parents=True)
    write_page(record, record.steps[-1], load_decoder(record), [], page)
