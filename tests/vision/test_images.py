"""Pictures become bytes without loss and pixels within limits, as Transformers makes them."""

import base64
import hashlib
import zlib
from io import BytesIO
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
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
from areal_core.data.processor import VisionProcessor, load_processor
from areal_core.errors import ImageError
from areal_core.testing.tiny_vision import VISION_FAMILIES, make_tiny_processor


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


def pixels_of(width: int, height: int) -> bytes:
    """Return a PNG file with a horizontal gradient."""
    image = Image.linear_gradient("L").resize((width, height)).convert("RGB")
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


PICTURES = [pixels_of(20, 20), pixels_of(17, 40)]
TWO = {"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}
MESSAGES = [{"role": "user", "content": [*TWO]}]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_prompts_and_pixels_are_those_of_transformers(family: str) -> None:
    theirs = make_tiny_processor(family)
    text = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True)
    expected = theirs(images=[decode(p) for p in PICTURES], text=[text], return_tensors="pt")
    processor = VisionProcessor(make_tiny_processor(family))
    prompt, pixels = processor.prompt(MESSAGES, PICTURES), processor.pixels(PICTURES)
    assert prompt.input_ids == expected["input_ids"][0].tolist()
    assert prompt.mm_token_type_ids == [int(t == processor.image_token_id) for t in prompt.input_ids]
    assert pixels.keys() == expected.keys() & {"pixel_values", "image_grid_thw"}
    assert all(torch.equal(pixels[key], expected[key]) for key in pixels)
    assert sum(processor.units(PICTURES)) == len(pixels["pixel_values"])


def test_a_prompt_whose_placeholders_and_pictures_differ_is_refused() -> None:
    processor = VisionProcessor(make_tiny_processor("qwen2_vl"))
    with pytest.raises(ImageError, match="has 2 placeholders of images and 1 images"):
        processor.prompt(MESSAGES, PICTURES[:1])
    literal = [{"role": "user", "content": "what is <|image_pad|>?"}]
    with pytest.raises(ImageError, match=r"1 placeholders .* and no text with '<\|image_pad\|>'"):
        processor.prompt(literal, [])


def test_a_saved_processor_is_the_same(tmp_path: Path) -> None:
    processor = VisionProcessor(make_tiny_processor("gemma3"))
    processor.save_pretrained(tmp_path)
    again = load_processor(str(tmp_path))
    assert again.identity() == processor.identity()
    assert again.prompt(MESSAGES, PICTURES) == processor.prompt(MESSAGES, PICTURES)
