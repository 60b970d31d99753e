"""A real SGLang server sees images as Transformers does; every planted fault is named."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from areal_core.data.processor import load_processor
from areal_core.rollout.types import Sampling
from areal_core.testing.tiny_vision import make_tiny_vision_model
from consistency.case import Request
from consistency.check import check
from consistency.live import Prompt, make_rescorer, query_engines, sampled_of, vocabulary_of
from consistency.score import load_scorer
from consistency.transforms import select_rows

from .test_planted_images import picture as planted_picture

pytestmark = [pytest.mark.sglang, pytest.mark.long]
PARAMS = Sampling(max_new_tokens=24)


def picture(seed: int) -> bytes:
    width, height = np.random.default_rng(seed).integers(40, 120, 2)
    return planted_picture(seed, (width, height))


def chat(num_images: int):
    parts = [*({"type": "image"} for _ in range(num_images)), {"type": "text", "text": "how many?"}]
    return [{"role": "user", "content": parts}]


def make_prompts(processor, num_prompts=12):
    """One image, or two every third time; the size of an image is that of the next one."""
    images = [(picture(i),) if i % 3 else (picture(i), picture(50 + i)) for i in range(num_prompts)]
    return [Prompt(tuple(processor.prompt(chat(len(seen)), seen).input_ids), {}, seen) for seen in images]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_vision_model(folder, "qwen2_5_vl", patch=14, initializer_range=0.3)


@pytest.fixture(scope="module")
def address(model, sglang):
    with sglang(model) as running:
        yield running.server.address


@pytest.fixture(scope="module")
def processor(model):
    return load_processor(str(model))


def named(folder, address, processor, sent=lambda prompts: prompts, **request):
    """Sample with what the engine is sent, and judge it as answers to the real prompts."""
    prompts, vocabulary = make_prompts(processor), vocabulary_of(processor.tokenizer, processor)
    samples = query_engines([address], sent(prompts), 2, PARAMS, vocabulary)
    true = tuple(prompt for prompt in prompts for _ in range(2))
    found = sampled_of(replace(samples, prompts=true), "float32", vocabulary)
    diagnosis = check(found, Request(str(folder), **request)).diagnosis
    return diagnosis.verdict, diagnosis.causes[0].id, diagnosis.causes[0].name, diagnosis


def test_logprobs_are_those_of_transformers_sampled_and_scored_again(model, address, processor):
    prompts, vocabulary = make_prompts(processor), vocabulary_of(processor.tokenizer, processor)
    samples = query_engines([address], prompts, 2, PARAMS, vocabulary)
    assert [reply.num_prompt for reply in samples.replies] == [len(prompt.ids) for prompt in samples.prompts]
    sampled = sampled_of(samples, "float32", vocabulary)
    rescorer = make_rescorer(samples.addresses, vocabulary)
    checked = check(sampled, Request(str(model)), rescorer=rescorer)
    assert (checked.diagnosis.verdict, checked.diagnosis.causes[0].id) == ("healthy", "R35")
    assert np.abs(checked.diagnosis.table.difference).max() < 1e-4
    # SGLang refuses to score a sampled special token of images: random models draw some.
    rows, special = checked.sequences, processor.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    drawn = [rows.input_ids[rows.row(row)][rows.sampled[rows.row(row)]] for row in range(rows.num_rows)]
    plain = np.flatnonzero([len(ids) > 0 and ids.max() < special for ids in drawn])
    rescore = make_rescorer([address], vocabulary)
    rescored = rescore(load_scorer(str(model)), select_rows(rows, plain), 1.0)
    assert max(rescored.prefill, rescored.decode) < 1e-5


def other_folder(model, folder, **options):
    """Copy the model with other options of its image processor: the trainer's side."""
    shutil.copytree(model, folder)
    file = folder / "processor_config.json"
    config = json.loads(file.read_text())
    config["image_processor"] |= options
    file.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}, "pixels normalised by CLIP"),
        ({"size": {"shortest_edge": 1568, "longest_edge": 6272}}, "images of at most 12544 pixels"),
    ],
)
def test_processor_of_the_server_is_named(model, address, processor, tmp_path, options, name):
    trained = other_folder(model, tmp_path / "trained", **options)
    verdict, cause, text, found = named(trained, address, load_processor(str(trained)))
    assert (verdict, cause) == ("mismatch", "R62")
    assert name in text
    assert ("R63" in [one.id for one in found.causes]) == ("size" in options)
