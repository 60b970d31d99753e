"""Pictures become bytes without loss, and bytes of anyone become pixels within limits."""

import base64
import hashlib
import zlib
from io import BytesIO
from urllib.parse import quote

import pytest
from PIL import Image

from areal_core.data.images import (
    as_image_bytes,
    bytes_of_url,
    data_url,
    decode,
    image_hash,
    shrunk,
    upright_png,
)
from areal_core.errors import ImageError


def picture(format: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (5, 3), **options) -> bytes:
    file = BytesIO()
    image = Image.new("RGB", size, (200, 30, 40))
    image.putpixel((0, 0), (1, 2, 3))
    image.convert(mode).save(file, format=format, **options)
    return file.getvalue()


PNG = picture()
BASE64 = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{BASE64}"


def test_each_form_of_a_picture_gives_its_original_bytes(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    for value in (PNG, bytearray(PNG), file, str(file), BASE64, URL, {"bytes": PNG, "path": None}):
        assert as_image_bytes(value) == PNG
    assert as_image_bytes({"bytes": None, "path": "a.png"}, tmp_path) == PNG
    assert as_image_bytes("a.png", tmp_path) == PNG
    assert bytes_of_url("data:image/png," + quote(PNG)) == PNG
    assert image_hash(PNG) == hashlib.sha256(PNG).hexdigest()


def test_a_rotated_photo_is_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 270 degrees to show it
    for format in ("JPEG", "PNG"):
        photo = picture(format, exif=exif.tobytes())
        upright = upright_png(photo)
        assert decode(photo).size == Image.open(BytesIO(upright)).size == (3, 5)
        assert Image.open(BytesIO(upright)).tobytes() == decode(photo).tobytes()
    assert upright_png(PNG) == PNG
    assert as_image_bytes(data_url(photo)) == upright


@pytest.mark.parametrize(("format", "kept"), [("PNG", "PNG"), ("JPEG", "JPEG"), ("WEBP", "PNG")])
def test_a_large_picture_shrinks_in_its_proportions(format, kept):
    large = picture(format, size=(400, 100))
    small = shrunk(large, 10_000)
    assert decode(small).size == (200, 50)
    assert Image.open(BytesIO(small)).format == kept
    assert shrunk(large, 40_000) == large


def big_png(width: int, height: int) -> bytes:
    """A PNG whose header has these sizes, with no pixels."""
    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n"
        + b"\0\0\0\x0d"
        + header
        + zlib.crc32(header).to_bytes(4, "big")
        + b"\0\0\0\1IDAT"
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", "image of 0 bytes"),
        (b"<svg onload=...>", "cannot be read; expected a complete file of PNG, JPEG"),
        (picture("TIFF"), "cannot be read"),
        (big_png(8193, 8193), "8193 x 8193 pixels; at most 67108864"),
        (big_png(10_000, 10_000), "too large"),
        (big_png(60_000, 60_000), "too large"),
        (bytes(64 * 2**20 + 1), "at most 67108864 are accepted"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,?", "is not base64"),
        ("nowhere.png", "no file 'nowhere.png', and not base64"),
        ("x" * 10_000 + "?", "not base64"),
        ("https://example.org/a.png", "images of rows are not fetched: save the file"),
        (7, "an image is a int; expected bytes"),
        ({"bytes": None, "path": None}, "an image is a dict"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "value",
)
def test_what_is_no_picture_is_refused_in_one_sentence(value, message):
    with pytest.raises(ImageError) as raised:
        as_image_bytes(value)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_url_never_reads_a_file(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    for url in (f"file://{tmp_path}/a.png", f"{tmp_path}/a.png"):
        with pytest.raises(ImageError, match="neither a data: URL nor http"):
            bytes_of_url(url, remote=True)


def test_damaged_pixels_are_refused_when_decoded():
    data = as_image_bytes(PNG[:-30])  # its header is complete
    with pytest.raises(ImageError, match="cannot be decoded"):
        decode(data)
