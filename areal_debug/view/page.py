"""The page: one file with style, script and data inline, a folder, or what a server sends.

    x.html              everything inline; a step is compressed, and unpacked when it is shown
    FOLDER/index.html   without the steps: it loads
    FOLDER/steps/*.js   the data of the steps, as script elements, which pages of files may load

The frame of all pages is around it, whose policy forbids requests beyond that.
"""

import base64
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from areal_core.safety.durable import replacing
from areal_core.safety.scratch import unfinished_folder
from areal_debug.report.frame import Frame, Link, framed
from areal_debug.view.contents import Contents
from areal_debug.view.pack import pack_json

ASSETS = Path(__file__).parent / "assets"
STYLES = ("uplot.css", "view.css")
SCRIPTS = (
    "load", "blobs", "links", "colours", "charts", "curves", "histograms", "align", "columns", "table",
    "calls", "sample", "search", "app",
)  # fmt: skip
STEPS = "<!-- steps -->"  # data is escaped or encoded: it has no such text
# Of one file: a browser keeps all of it in memory. A folder has no limit.
MAX_FILE_BYTES = 256_000_000
# What may be loaded, and whom the page may ask, by where the steps are.
POLICIES = {"inline": ("", "'none'"), "files": ("'self' file:", "'none'"), "server": ("", "'self'")}


def write_file(
    contents: Contents,
    document: dict[str, Any],
    output: Path,
    tick: Callable[[object], None],
    links: Sequence[Link] = (),
) -> int:
    """Write the page with the stored steps of the document as one file; return its size in bytes.

    Raises ValueError if it would have more than `MAX_FILE_BYTES`.
    """
    before, after = page_around("inline", document, links)
    size_bytes = len(before) + len(after)
    with replacing(output) as file:
        file.write(before)
        for step in document["stored"]:
            for name in contents.names(step):
                blob = f'<script type="text/plain" id="{name}">{encoded(contents.blob(name))}</script>\n'.encode()
                size_bytes += len(blob)
                if size_bytes > MAX_FILE_BYTES:
                    raise ValueError(
                        f"one file would have more than {MAX_FILE_BYTES // 10**6} MB at step {step}: "
                        "write a folder (-o FOLDER), which loads a step when it is shown"
                    )
                file.write(blob)
            tick(step)
        file.write(after)
    return size_bytes


def write_folder(
    contents: Contents,
    document: dict[str, Any],
    output: Path,
    tick: Callable[[object], None],
    links: Sequence[Link] = (),
) -> int:
    """Write the page as a folder that loads a step when it is shown; return its size in bytes."""
    with unfinished_folder(output) as folder:
        (folder / "steps").mkdir(parents=True)
        page = b"".join(page_around("files", document, links))
        size_bytes = (folder / "index.html").write_bytes(page)
        for step in document["stored"]:
            for name in contents.names(step):
                script = f'receive("{name}", "{encoded(contents.blob(name))}");\n'
                size_bytes += (folder / "steps" / f"{name}.js").write_bytes(script.encode())
            tick(step)
    return size_bytes


def served_page(document: dict[str, Any]) -> bytes:
    return b"".join(page_around("server", document))


def page_around(source: str, document: dict[str, Any], links: Sequence[Link] = ()) -> tuple[bytes, bytes]:
    records = [side["record"] for side in document["sides"]]
    names = " and ".join(PurePosixPath(record).name or record for record in records)
    loads, connect = POLICIES[source]
    data = f'<script type="text/plain" id="document-data" data-source="{source}">{encoded(pack_json(document))}</script>'
    licence = f"/*! uPlot\n{page_file('uplot.LICENSE.txt')}*/"
    own = (page_file(f"{name}.js") for name in SCRIPTS)
    page = framed(
        Frame(title=" and ".join(records), run=names, kind="view", links=links),
        f"{page_file('view.html')}{data}\n{STEPS}",
        style="".join(map(page_file, STYLES)),
        script="\n".join(['"use strict";', licence, page_file("uplot.js"), *own]),
        loads=loads,
        connect=connect,
        images="data:",
        tools=page_file("tools.html").strip(),
    )
    before, after = page.encode().split(STEPS.encode())
    return before, after


def encoded(data: bytes) -> str:
    """Return bytes as text that is inert in HTML and in a script."""
    return base64.b64encode(data).decode()


@cache
def page_file(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
