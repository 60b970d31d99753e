"""The processor of a vision model: prompts and pixels as Transformers makes them."""

from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from areal_core.data.images import decode
from areal_core.data.processor import VisionProcessor, load_processor
from areal_core.errors import ImageError
from areal_core.testing.tiny_vision import VISION_FAMILIES, make_tiny_processor


def picture(width: int, height: int) -> bytes:
    """Return a PNG file with a horizontal gradient."""
    image = Image.linear_gradient("L").resize((width, height)).convert("RGB")
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


PICTURES = [picture(20, 20), picture(17, 40)]
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
