"""The embedded engine reads pictures: log-probs are those of a plain forward of the model."""

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText

from areal_core.data.image_rows import shape_rows
from areal_core.data.processor import VisionProcessor, load_processor
from areal_core.embedded.engine import EmbeddedEngine
from areal_core.embedded.replica import Replica
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling
from areal_core.testing.tiny_vision import VISION_FAMILIES, make_tiny_vision_model

ROWS = shape_rows(num_rows=3, seed=1, size=32)
PICTURES = [row["images"][0] for row in ROWS]
QUICK = ("qwen2_5_vl", "gemma3")
PARTS = {"image": {"type": "image"}, "text": {"type": "text", "text": "How many?"}}


def request(processor: VisionProcessor, parts: list[str], pictures: list[int], sample_id: int, count: int):
    images = tuple(PICTURES[i] for i in pictures)
    message = {"role": "user", "content": [PARTS[part] for part in parts]}
    prompt = processor.prompt([message], images)
    sampling = Sampling(max_new_tokens=count, temperature=0.9, ignore_eos=True)
    return ModelRequest(
        input_ids=prompt.input_ids,
        sampling=sampling,
        metadata={"prompt_id": len(parts), "sample_id": sample_id},
        images=images,
        image_token_id=processor.image_token_id,
    )


def sampled(replica: Replica, requests: list[ModelRequest], **options) -> list[ModelResponse]:
    vocab_size = replica.model.config.get_text_config().vocab_size
    engine = EmbeddedEngine(replica, vocab_size, **options)

    async def work():
        return await asyncio.gather(*(engine.agenerate(r) for r in requests))

    return asyncio.run(work())


def plain_logprobs(model, processor, request, response) -> torch.Tensor:
    """Log-probs of the completion by Transformers' own forward of one row."""
    ids = torch.tensor([response.input_tokens + response.output_tokens])
    num_prompt = len(response.input_tokens)
    types = (ids == processor.image_token_id).long()
    types[:, num_prompt:] = 0
    name = "token_type_ids" if "gemma3" in model.config.model_type else "mm_token_type_ids"
    options = processor.pixels(request.images) | {name: types} if request.images else {}
    with torch.no_grad():
        logits = model(input_ids=ids, **options).logits[0, num_prompt - 1 : -1]
    chosen = torch.tensor(response.output_tokens)
    return (logits / 0.9).log_softmax(-1).gather(1, chosen[:, None])[:, 0]


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in VISION_FAMILIES],
)
def test_log_probs_are_those_of_a_plain_forward(tmp_path, family):
    folder = make_tiny_vision_model(tmp_path, family)
    processor = load_processor(str(folder))
    replica = Replica(str(folder), torch.float32, torch.device("cpu"), processor)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    requests = [
        request(processor, ["image", "text"], [0], 0, 9),
        request(processor, ["image", "text"], [0], 1, 4),  # shares the prompt
        request(processor, ["image", "text"], [1], 2, 6),  # the same tokens, another picture
        request(processor, ["text", "image", "text", "image"], [2, 0], 0, 12),
        request(processor, ["text"], [], 0, 5),
    ]
    # A sampled placeholder is an ordinary token here, and would be a picture to the plain forward.
    without = {"stop_token_ids": [processor.image_token_id], "ignore_eos": False}
    requests = [replace(r, sampling=replace(r.sampling, **without)) for r in requests]
    together = sampled(replica, requests)
    assert max(len(response.output_tokens) for response in together) > 5
    for one, response in zip(requests, together, strict=True):
        expected = plain_logprobs(model, processor, one, response)
        torch.testing.assert_close(torch.tensor(response.output_logprobs), expected, atol=1e-5, rtol=0)
    # The picture matters: the same tokens with another one have other log-probs.
    blind = plain_logprobs(model, processor, replace(requests[0], images=requests[2].images), together[0])
    assert (blind - torch.tensor(together[0].output_logprobs)).abs().max() > 1e-3
    alone = [sampled(replica, [r])[0].output_tokens for r in requests]
    assert alone == [response.output_tokens for response in together]
