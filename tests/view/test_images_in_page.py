"""Pictures in the page: from its own bytes of formats of pixels."""

import threading

import numpy as np
import pytest

from areal_debug.view.data import TokenText, with_images_named
from areal_debug.view.page import Contents, FollowedRecord, make_server
from recorder.testing import in_step, scripted_batch, send_step, start_facts
from recorder.writer import RecordWriter
from tests.recorder.pictured import png, with_pictures

from .pages import open_ready, write_page

SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><script>document.title="owned"</script></svg>'
)
BOMB = png(1)[:16] + (60000).to_bytes(4, "big") * 2 + png(1)[24:]  # its header claims 60000 x 60000
ROWS = [[png(1), png(2, 40, 30)], [png(1), SVG], [BOMB, b"\xff\xd8\xff" + bytes(40)], []]
ABOUT = [
    f"PNG, 8 x 6, {len(png(1))} bytes",
    f"PNG, 40 x 30, {len(png(2, 40, 30)):,} bytes",
    f"unknown format, size unknown, {len(SVG)} bytes",
    f"PNG, 60000 x 60000, {len(BOMB)} bytes",
    "JPEG, size unknown, 43 bytes",
]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures") / "record"
    writer = RecordWriter(folder)
    writer("start", **start_facts())
    for step in range(2):
        batch = scripted_batch([5, 6, 7, 3], seed=step)
        send_step(writer, step, in_step(with_pictures(batch, ROWS), step))
    writer("end", steps=2, error=None)
    return folder


def shown(page, row):
    """Return captions and natural sizes of the pictures of a row."""
    page.evaluate(f"choose({row})")
    page.wait_for("!document.querySelector('.images') || document.querySelector('.images figcaption')")
    page.wait_for("[...document.querySelectorAll('.images img')].every(one => one.complete)")
    captions = page.evaluate(
        "[...document.querySelectorAll('.images figcaption')].map(one => one.textContent)"
    )
    sizes = page.evaluate(
        "[...document.querySelectorAll('.images img')].map(one => [one.naturalWidth, one.naturalHeight])"
    )
    return captions, sizes


def check_page(page):
    assert shown(page, 0) == ([f"image 0: {ABOUT[0]}", f"image 1: {ABOUT[1]}"], [[8, 6], [40, 30]])
    assert shown(page, 1) == ([f"image 0: {ABOUT[0]}", f"image 1: {ABOUT[2]}, not shown"], [[8, 6]])
    assert shown(page, 2) == ([f"image 0: {ABOUT[3]}, not shown", f"image 1: {ABOUT[4]}, not shown"], [])
    assert shown(page, 3) == ([], [])
    assert page.errors == []
    assert page.evaluate("document.title") != "owned"


@pytest.mark.parametrize("name", ["page.html", "folder"])
def test_a_page_of_files_shows_pictures_and_requests_nothing(page, record, tmp_path, name):
    options = ["--all-steps"] if name == "folder" else []
    address = write_page(tmp_path / name, record, *options)
    open_ready(page, f"{address}/index.html" if options else address)
    check_page(page)
    assert all(one.startswith(("file:", "data:image/")) for one in page.requests)


def test_a_served_page_shows_pictures(page, record):
    with make_server(Contents(FollowedRecord(str(record), None)), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        open_ready(page, server.address)
        check_page(page)
        server.shutdown()


def test_each_run_of_placeholders_is_one_phrase():
    text = TokenText(np.array([0, 1, 1, 0, 1, 1, 1], np.uint32), ["a", "<pad>"], [5, 6])
    types = np.array([0, 1, 1, 0, 1, 1, 1])
    found = with_images_named(text, np.array([0, 5, 7]), types)  # the second row begins in a picture
    assert [found.texts[entry] for entry in found.index] == [
        "a", "[image: 2 tokens]", "", "a", "[image: 1 tokens]", "[image: 2 tokens]", "",
    ]  # fmt: skip
