"""What an engine does to images is planted one fault at a time, and named with its option."""

from dataclasses import dataclass, replace
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from areal_core.data.images import data_url
from areal_core.testing.tiny_vision import make_tiny_vision_model
from consistency.alternatives.images import (
    expanded,
    placeholder_counts,
    prepare_images,
    stored_orientation,
    with_options,
)
from consistency.case import Request
from consistency.check import check
from consistency.errors import BadPrompts, NothingToCompare
from consistency.live import parse_prompt
from consistency.score import Scorer, hidden_states, load_scorer, score
from consistency.source import Sampled, Sampling
from consistency.tokens import Completion, Sequences, sequences_from_completions

NUM_ROWS, NUM_TOKENS = 6, 24
LONG = pytest.mark.long
EVERYTHING = Sampling(1.0, 1.0, None, False, "float32", "float32")


@dataclass(frozen=True)
class World:
    folder: str
    scorer: Scorer
    prompts: tuple[tuple[list[int], tuple[bytes, ...]], ...]


def picture(seed: int, size=(40, 28), **save) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, **{"format": "PNG"} | save)
    return file.getvalue()


def question(scorer: Scorer, images: tuple[bytes, ...], text="how many?"):
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    return scorer.processor.prompt([{"role": "user", "content": content}], images).input_ids


def make_world(folder, family: str) -> World:
    path = str(make_tiny_vision_model(folder, family, initializer_range=0.3))
    scorer = load_scorer(path)
    images = [(picture(row),) if row % 3 else (picture(row), picture(50 + row)) for row in range(NUM_ROWS)]
    prompts = tuple((question(scorer, seen), seen) for seen in images)
    return World(path, scorer, prompts)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl")


def sample(world: World, engine: Scorer, seen=lambda rows: rows) -> Sequences:
    """Sample from `engine`, which gets the rows as `seen` changes them, without a cache."""
    random = torch.Generator().manual_seed(0)
    completions = []
    for ids, images in world.prompts:
        drawn: list[int] = []
        for _ in range(NUM_TOKENS):
            rows = seen(sequences_from_completions([Completion(ids, drawn, [0.0] * len(drawn), images)]))
            hidden = hidden_states(engine, rows.input_ids, [len(rows.input_ids)], rows.images)
            logits = engine.head.cap(engine.head.uncapped(hidden[-1:]))[0]
            logits[engine.processor.image_token_id] = -torch.inf
            drawn.append(int(torch.multinomial(logits.softmax(0), 1, generator=random)))
        completions.append(Completion(ids, drawn, [0.0] * len(drawn), images))
    rows = sequences_from_completions(completions)
    rows.engine_logprobs[rows.scored] = score(engine, seen(rows)).logprob
    return rows


def first_cause(world: World, rows: Sequences, **request):
    found = check(Sampled({"rows": rows}, EVERYTHING), Request(world.folder, **request)).diagnosis
    return found.verdict, found.causes[0].id, found.causes[0].name + " " + found.causes[0].evidence


def with_images(change):
    return lambda rows: replace(rows, images=change(rows.images))


@pytest.fixture(scope="module")
def sound(world) -> Sequences:
    return sample(world, world.scorer)


def test_images_without_a_fault_are_healthy(world, sound):
    assert first_cause(world, sound)[:2] == ("healthy", "R35")


def test_other_pixels_are_named_with_their_option(world):
    options = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    engine = replace(world.scorer, processor=with_options(world.scorer.processor, **options))
    verdict, cause, text = first_cause(world, sample(world, engine))
    assert (verdict, cause) == ("mismatch", "R62")
    assert "pixels normalised by 0.5" in text


@LONG
def test_positions_of_text_are_named(world):
    rows = sample(world, replace(world.scorer, marks_images=False))
    assert first_cause(world, rows)[:2] == ("mismatch", "R64")


@LONG
def test_ignored_orientation_is_named(world):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = tuple(picture(90 + row, exif=exif) for row in range(NUM_ROWS))
    prompts = tuple((question(world.scorer, (image,)), (image,)) for image in turned)
    tilted = replace(world, prompts=prompts)
    seen = with_images(lambda images: tuple(tuple(map(stored_orientation, row)) for row in images))
    processor = world.scorer.processor

    def engine_sees(rows):
        stored = seen(rows)
        return expanded(stored, processor.image_token_id, placeholder_counts(processor, stored.images))

    verdict, cause, text = first_cause(tilted, sample(tilted, world.scorer, engine_sees))
    assert (verdict, cause) == ("mismatch", "R62")
    assert "EXIF ignored" in text


def test_tokens_from_a_sampled_placeholder_on_are_left_out(world, sound):
    rows = replace(sound, input_ids=sound.input_ids.copy())
    at = int(rows.scored[NUM_TOKENS + 5])
    rows.input_ids[at] = world.scorer.processor.image_token_id
    checked = check(Sampled({"rows": rows}, EVERYTHING), Request(world.folder))
    assert checked.diagnosis.verdict == "healthy"
    assert checked.diagnosis.measurement.num_tokens == NUM_ROWS * NUM_TOKENS - NUM_TOKENS + 5
    assert checked.notes == (
        f"{NUM_TOKENS - 5} tokens from a sampled placeholder of an image on are not compared",
    )


def test_rows_whose_placeholders_do_not_match_their_images_are_refused(world, sound):
    rows = replace(sound, images=((),) * NUM_ROWS)
    with pytest.raises(NothingToCompare, match="row 0 has 0 images and 2 runs of their placeholder"):
        prepare_images(world.scorer, Sampled({"rows": rows}, EVERYTHING))


def test_prompts_of_a_file_name_their_images_beside_a_chat_text_or_ids(world):
    processor, image = world.scorer.processor, picture(0)
    ids = question(world.scorer, (image,))
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}]
    text = processor.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    for row in ({"messages": chat}, {"text": text}, {"input_ids": ids}):
        found = parse_prompt(row | {"images": [data_url(image)]}, processor.tokenizer, "row 0", processor)
        assert (list(found.ids), found.images) == (ids, (image,))
    with pytest.raises(BadPrompts, match="row 0 has images, and the model is a text model"):
        parse_prompt({"text": "x", "images": [image]}, processor.tokenizer, "row 0")
