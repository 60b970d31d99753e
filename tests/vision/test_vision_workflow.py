"""A vision workflow returns original bytes and types of tokens, and wrong counts are refused."""

import asyncio

import pytest

from areal_core.data.batch import pad_and_concat
from areal_core.data.image_rows import shape_rows
from areal_core.data.processor import VisionProcessor
from areal_core.engine.vision_models import image_keys
from areal_core.errors import ImageError
from areal_core.rollout.episodes import refuse_malformed, refuse_unusable
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


def test_rows_with_and_without_pictures_make_one_batch(processor):
    both, *_ = episode(processor, {"messages": MESSAGES, "images": [PICTURES[0]]})
    none, *_ = episode(processor, {"messages": [{"role": "user", "content": "Hi"}], "images": []})
    batch = pad_and_concat([none, both])
    assert batch["image_count"].tolist() == [0, 1]
    assert batch["image_data"].numpy().tobytes() == PICTURES[0]
    assert image_keys([PICTURES, []])["image_count"].tolist() == [2, 0]
