"""Requests with pictures: one placeholder each, which the server expands."""

import pytest

from areal_core.data.image_rows import shape_rows
from areal_core.data.images import data_url
from areal_core.data.processor import VisionProcessor
from areal_core.rollout.errors import UnsupportedSampling
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.servers.sglang import SGLANG
from areal_core.servers.vllm import VLLM
from areal_core.servers.wire import collapsed
from areal_core.testing.tiny_vision import make_tiny_processor

PICTURES = tuple(row["images"][0] for row in shape_rows(num_rows=2, seed=1, size=32))
PARTS = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]


def request(processor: VisionProcessor, **sampling) -> ModelRequest:
    prompt = processor.prompt([{"role": "user", "content": PARTS}], PICTURES)
    return ModelRequest(
        input_ids=prompt.input_ids,
        sampling=Sampling(stop_token_ids=[processor.image_token_id], **sampling),
        images=PICTURES,
        image_token_id=processor.image_token_id,
    )


def test_requests_and_scorings_have_one_placeholder_a_picture_and_the_sampled_tokens():
    asked = request(VisionProcessor(make_tiny_processor("qwen2_5_vl")))
    token, sampled = asked.image_token_id, [7, 8]
    row = asked.input_ids + sampled
    for payload in (
        SGLANG.generate_payload(row, asked.sampling, 4, 2, "a"),
        SGLANG.score_payload(row, len(asked.input_ids), "a"),
    ):
        found = SGLANG.with_images(payload, asked)
        assert found["input_ids"] == collapsed(asked.input_ids, token, 2) + sampled
        assert found["input_ids"].count(token) == 2
        assert found["image_data"] == [data_url(image) for image in PICTURES]
        assert found.get("logprob_start_len", len(asked.input_ids) - 1) == len(asked.input_ids) - 1
    assert collapsed([1, 9, 9, 2, 9, 3], 9, 2) == [1, 9, 2, 9, 3]
    with pytest.raises(UnsupportedSampling, match="1 runs of image tokens and 2 images"):
        collapsed([1, 9, 9, 9, 3], 9, 2)
    found = VLLM.with_images({"token_ids": row}, asked)
    assert found["token_ids"] == collapsed(asked.input_ids, token, 2) + sampled
    assert [part["url"] for part in found["content_parts"]] == [data_url(image) for image in PICTURES]
