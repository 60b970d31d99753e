"""A vision workflow returns original bytes and types of tokens, and wrong counts are refused."""

import asyncio

import pytest
import torch

from areal_core.data.batch import pad_and_concat
from areal_core.data.image_rows import shape_rows
from areal_core.data.processor import VisionProcessor
from areal_core.engine.vision_models import image_keys
from areal_core.errors import ImageError
from areal_core.rollout.episodes import refuse_malformed, refuse_unusable
from areal_core.rollout.errors import MalformedEpisode
from areal_core.rollout.types import Sampling
from areal_core.rollout.vision_workflow import VisionRLVRWorkflow
from areal_core.rollout.workflow import RLVRWorkflow
from areal_core.testing import ScriptedEngine
from areal_core.testing.tiny_vision import make_tiny_processor

PICTURES = [row["images"][0] for row in shape_rows(num_rows=2, size=32)]
MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "gemma3"])
def processor(request):
    return VisionProcessor(make_tiny_processor(request.param))


def episode(processor, data):
    engine, asked = ScriptedEngine(vocabulary_size=60), []

    async def reward_fn(*texts, **row):
        asked.append((texts, row))
        return 0.5

    workflow = VisionRLVRWorkflow(reward_fn, Sampling(), processor.tokenizer, processor)
    rows = asyncio.run(workflow.arun_episode(engine, data))
    refuse_unusable(rows)
    refuse_malformed(rows)
    return rows, engine.requests[0], asked


def test_a_row_has_the_pictures_bytes_and_its_placeholders_types(processor):
    data = {"messages": MESSAGES, "images": [PICTURES[0]], "answer": "3"}
    rows, sent, [(texts, given)] = episode(processor, data)
    prompt = processor.prompt(MESSAGES, [PICTURES[0]])
    assert sent.input_ids == prompt.input_ids
    assert sent.images == (PICTURES[0],)
    assert sent.image_token_id == processor.image_token_id
    assert processor.image_token_id in sent.sampling.stop_token_ids
    assert rows["input_ids"][0, :-1].tolist() == prompt.input_ids
    assert rows["mm_token_type_ids"].tolist() == [[*prompt.mm_token_type_ids, 0]]
    assert rows["image_count"].tolist() == [1]
    assert rows["image_bytes"].tolist() == [len(PICTURES[0])]
    assert rows["image_data"].numpy().tobytes() == PICTURES[0]
    assert rows["rewards"].tolist() == [0.5]
    assert texts[2] == prompt.input_ids
    assert given["answer"] == "3"


def test_a_workflow_of_text_refuses_a_row_with_a_picture():
    processor = VisionProcessor(make_tiny_processor("qwen2_5_vl"))
    workflow = RLVRWorkflow(None, Sampling(), processor.tokenizer)
    engine = ScriptedEngine(vocabulary_size=60)
    with pytest.raises(ImageError, match=r"this workflow sends text alone: use areal_core\.rollout\.vision"):
        asyncio.run(workflow.arun_episode(engine, {"messages": MESSAGES, "images": [PICTURES[0]]}))
    assert engine.requests == []


def test_a_text_that_is_rendered_already_gives_the_same_prompt(processor):
    text = processor.processor.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    rendered, *_ = episode(processor, {"messages": text, "images": [PICTURES[1]]})
    rows, *_ = episode(processor, {"messages": MESSAGES, "images": [PICTURES[1]]})
    assert all(torch.equal(rendered[key], rows[key]) for key in rows)


def test_rows_with_and_without_pictures_make_one_batch(processor):
    both, *_ = episode(processor, {"messages": MESSAGES, "images": [PICTURES[0]]})
    none, *_ = episode(processor, {"messages": [{"role": "user", "content": "Hi"}], "images": []})
    batch = pad_and_concat([none, both])
    assert batch["image_count"].tolist() == [0, 1]
    assert batch["image_data"].numpy().tobytes() == PICTURES[0]
    assert image_keys([PICTURES, []])["image_count"].tolist() == [2, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_count": torch.tensor([2], dtype=torch.int32)}, "image_bytes with 1 entries; expected 2"),
        ({"image_data": torch.zeros(3, dtype=torch.uint8)}, "image_data with 3 entries; expected"),
        ({"mm_token_type_ids": None}, "images without mm_token_type_ids"),
        ({"image_count": torch.tensor([1, 0]).int()}, "image_count with 2 entries; expected 1"),
        (
            {"image_grid_thw": torch.ones(2, 3, dtype=torch.int32)},
            "image_grid_thw with 2 entries; expected 1",
        ),
        ({"image_bytes": None, "image_data": None}, "images without image_bytes, image_data"),
    ],
)
def test_counts_that_disagree_are_refused(processor, change, message):
    rows, *_ = episode(processor, {"messages": MESSAGES, "images": [PICTURES[0]]})
    rows = {key: value for key, value in (rows | change).items() if value is not None}
    with pytest.raises(MalformedEpisode, match=message):
        refuse_unusable(rows)


def test_wrong_dtypes_and_trained_pictures_are_refused(processor):
    rows, *_ = episode(processor, {"messages": MESSAGES, "images": [PICTURES[0]]})
    with pytest.raises(MalformedEpisode, match=r"image_data as torch\.int32; expected torch\.uint8"):
        refuse_malformed(rows | {"image_data": rows["image_data"].int()})
    with pytest.raises(MalformedEpisode, match="loss_mask of 1 on tokens of images"):
        refuse_malformed(rows | {"loss_mask": torch.ones_like(rows["loss_mask"])})
