"""Requests with pictures: one placeholder each, which the server expands."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from areal_core.data.image_rows import shape_rows
from areal_core.data.images import data_url
from areal_core.data.processor import VisionProcessor, load_processor
from areal_core.rollout.errors import UnsupportedSampling
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.servers.sglang import SGLANG
from areal_core.servers.vllm import VLLM
from areal_core.servers.wire import collapsed
from areal_core.testing.embedded_server import EmbeddedServer
from areal_core.testing.tiny_vision import make_tiny_processor, make_tiny_vision_model
from tests.rollout.sampled import ask

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


def test_a_server_samples_with_the_log_probs_of_a_plain_forward(tmp_path, serve_application):
    folder = make_tiny_vision_model(tmp_path, "qwen2_5_vl")
    server = EmbeddedServer(str(folder))
    processor = load_processor(str(folder))
    asked = request(processor, max_new_tokens=6)

    [response] = ask([serve_application(server.application())], [asked])
    server.sampler.close()
    assert response.input_tokens == asked.input_ids
    # Without the last token, which may be the image token.
    ids = torch.tensor([response.input_tokens + response.output_tokens[:-1]])
    types = (ids == processor.image_token_id).long()
    types[:, len(asked.input_ids) :] = 0
    model = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        logits = model(input_ids=ids, **processor.pixels(PICTURES), mm_token_type_ids=types).logits[0]
    logprobs = logits[len(asked.input_ids) - 1 :].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor([response.output_tokens]).T)[:, 0]
    torch.testing.assert_close(torch.tensor(response.output_logprobs), expected, atol=1e-5, rtol=0)


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
