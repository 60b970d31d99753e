"""A workflow of images copied from AReaL, with our request, gives rows that train."""

import asyncio

import pytest
import torch

from areal_core.data.batch import pad_and_concat
from areal_core.data.image_rows import shape_rows
from areal_core.data.images import as_image_bytes, decode
from areal_core.data.processor import VisionProcessor
from areal_core.rollout.episodes import EpisodeEngine, run_episodes, with_our_keys
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.testing import ScriptedEngine
from areal_core.testing.tiny_vision import make_tiny_processor

PICTURES = [decode(row["images"][0]) for row in shape_rows(num_rows=2, size=32)]


class Copied:
    """What AReaL's VisionRLVRWorkflow does, with its dtypes and its keys."""

    def __init__(self, processor):
        self.processor = processor

    async def arun_episode(self, engine, data):
        given = self.processor(
            images=data["images"], text=data["messages"], padding=False, return_tensors="pt"
        )
        name = "mm_token_type_ids" if "mm_token_type_ids" in given else "token_type_ids"  # Gemma 3
        prompt, types = given["input_ids"].tolist()[0], given[name].tolist()[0]
        images = tuple(map(as_image_bytes, data["images"]))
        sampling = Sampling(max_new_tokens=4)
        request = ModelRequest(input_ids=prompt, sampling=sampling, images=images, image_token_id=1)
        reply = await engine.agenerate(request)
        num_in, num_out = len(prompt), len(reply.output_tokens)
        pixels = {"pixel_values": given["pixel_values"]}
        if "image_grid_thw" in given:
            pixels["image_grid_thw"] = given["image_grid_thw"]
        return {
            "input_ids": torch.tensor([prompt + reply.output_tokens]),
            "mm_token_type_ids": torch.tensor([types + [0] * num_out]),
            "loss_mask": torch.tensor([[0] * num_in + [1] * num_out], dtype=torch.int32),
            "logprobs": torch.tensor([[0.0] * num_in + reply.output_logprobs]),
            "multi_modal_input": [pixels],
            "versions": torch.tensor([[-1] * num_in + reply.output_versions], dtype=torch.int32),
            "turn_ids": torch.tensor([[-1] * num_in + [0] * num_out], dtype=torch.int32),
            "attention_mask": torch.ones(1, num_in + num_out, dtype=torch.bool),
            "rewards": torch.tensor([1.0]),
        }


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("num_images", [1, 2])
def test_its_rows_have_the_pixels_and_counts_of_ours(family, num_images):
    own = VisionProcessor(make_tiny_processor(family))
    chat = [{"role": "user", "content": [*[{"type": "image"}] * num_images, {"type": "text", "text": "?"}]}]
    text = own.tokenizer.apply_chat_template(chat, tokenize=False)
    data = {"images": PICTURES[:num_images], "messages": text}
    episode = EpisodeEngine(ScriptedEngine(vocabulary_size=60), 0, 0)
    (rows,) = asyncio.run(run_episodes([episode], Copied(own.processor), data, check_format=True))
    images = [as_image_bytes(picture) for picture in data["images"]]
    expected = own.pixels(images)
    assert torch.equal(rows["pixel_values"], expected["pixel_values"])
    assert rows["image_count"].tolist() == [num_images]
    assert rows["image_units"].tolist() == own.units(images)
    assert ("image_grid_thw" in rows) == (family == "qwen2_5_vl")
    prompt = own.tokenize(text, images)
    assert rows["input_ids"][0, : len(prompt.input_ids)].tolist() == prompt.input_ids
    assert rows["mm_token_type_ids"].sum() == sum(prompt.mm_token_type_ids)
    assert rows["finish_reason"].tolist() == [0]  # of the scripted engine's reply: stop
    assert not rows.keys() & {"multi_modal_input", "turn_ids"}
    assert pad_and_concat([rows, rows])["image_count"].tolist() == [num_images] * 2


def test_a_row_without_images_has_the_count_zero():
    rows = {
        "input_ids": torch.zeros(2, 3),
        "multi_modal_input": [{}, {"pixel_values": torch.zeros(1, 3, 4, 4)}],
    }
    found = with_our_keys(rows, "stop")
    assert found["image_count"].tolist() == [0, 1]
    assert found["image_units"].tolist() == [1]
    assert "finish_reason" not in found  # two rows: which one ended so is not known
