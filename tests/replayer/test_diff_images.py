"""`diff` names the picture that differs: its row, its file, and the region of its pixels."""

import io

import numpy as np
from PIL import Image

from recorder import open_record
from recorder.testing import in_step, scripted_batch, send_step
from replayer.diff import diff_records
from tests.recorder.pictured import png, with_pictures
from tests.recorder.ranks import begin


def write(folder, rows, **changes):
    (writer,) = begin(folder)
    for step in range(2):
        batch = in_step(scripted_batch([3, 4, 5, 6], seed=step), step)
        send_step(writer, step, with_pictures(batch, rows[step]) | changes)
    writer("end", steps=2, error=None)
    return open_record(folder)


def painted(picture):
    """Return the picture with a rectangle of 3 x 2 pixels changed."""
    pixels = np.array(Image.open(io.BytesIO(picture)))
    pixels[2:4, 4:7] ^= 0xFF
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def compare(tmp_path, other):
    rows = [[png(1), png(2)], [png(1), png(2)], [png(3)], [png(3)]]
    changed = [rows[0], [rows[1][0], other], *rows[2:]]
    left, right = write(tmp_path / "a", [rows, rows]), write(tmp_path / "b", [rows, changed])
    return diff_records(left, right)


def test_the_region_of_the_pixels_is_named(tmp_path):
    report = compare(tmp_path, painted(png(2)))
    (difference,) = report.differences
    assert (report.step, difference.stage, difference.name) == (1, "batch", "images")
    assert (difference.place.row, difference.place.sample_id, difference.place.token) == (1, 1, None)
    assert (difference.num_different, difference.num_compared) == (1, 6)
    assert difference.left.startswith(f"image 1 (PNG, 8 x 6, {len(png(2))} bytes, sha256 ")
    assert difference.right.endswith("; 6 of 48 pixels differ, x 4 to 6, y 2 to 3)")
    assert report.verdict.why == "the same prompts have other pictures: check the data set"


def test_the_same_pixels_in_another_file_are_said_to_be_the_same(tmp_path):
    file = io.BytesIO()
    Image.open(io.BytesIO(png(2))).save(file, format="BMP")
    assert compare(tmp_path, file.getvalue()).first.right.endswith("; the same pixels in another file)")


def test_a_picture_that_one_side_lacks_is_absent(tmp_path):
    rows = [[png(1)], [png(1)], [png(3)], [png(3)]]
    left, right = write(tmp_path / "a", [rows, rows]), write(tmp_path / "b", [[*rows[:3], []], rows])
    first = diff_records(left, right).first
    assert (first.right, first.num_different, first.place.row) == (None, 1, 3)
