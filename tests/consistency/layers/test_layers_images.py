"""`--layers` with images: the processor, the tower, or a layer after them is named."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_core.data.images import data_url
from areal_core.data.processor import load_processor
from areal_core.engine.model import load_model
from areal_core.testing.tiny_vision import make_tiny_vision_model
from consistency.layers.judge import compare_layers, reference_of
from consistency.layers.observed import Row, embedded, transformers
from tests.command_line import invoke

from ...recorder.pictured import png

LONG = pytest.mark.long
PICTURES = [(png(0, 24, 16),), (), (png(1, 24, 24), png(2, 16, 32))]
ANSWER = list(range(20, 32))


def chat(num_images):
    parts = [{"type": "image"}] * num_images
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "how many?"}]}]


def rows_of(folder):
    processor = load_processor(str(folder))
    return [
        Row(processor.prompt(chat(len(seen)), seen).input_ids + ANSWER, seen, processor.image_token_id)
        for seen in PICTURES
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_vision_model(tmp_path_factory.mktemp("vision") / "model", "qwen2_5_vl")


def changed(model, folder, options=None, weights=()):
    """Copy a model with other options of its image processor, or some weights moved."""
    shutil.copytree(model, folder)
    file = folder / "processor_config.json"
    config = json.loads(file.read_text())
    config["image_processor"] |= options or {}
    file.write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    moved = {name: tensor * 1.01 if name.endswith(weights) else tensor for name, tensor in tensors.items()}
    save_file(moved if weights else tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def report_of(model, values, rows):
    reference = load_model(str(model), dtype=values.dtype, attn_implementation="sdpa")
    return compare_layers(reference_of(reference), values, rows)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen2_5_vl", torch.float32),
        pytest.param("qwen2_vl", torch.float32, marks=LONG),
        pytest.param("qwen3_vl", torch.float32, marks=LONG),
        pytest.param("gemma3", torch.float32, marks=LONG),
        pytest.param("qwen3_vl", torch.bfloat16, marks=LONG),
    ],
)
def test_the_embedded_engine_is_healthy_after_images(family, dtype, tmp_path):
    folder = make_tiny_vision_model(tmp_path / "model", family)
    rows = rows_of(folder)
    report = report_of(folder, embedded(folder, dtype, rows), rows)
    assert (report.verdict, report.only_reference) == ("healthy", ()), report.first
    seen = {site.operator for site in report.sites}
    assert {"image processor", "embedding", "vision tower", "rope", "head"} <= seen


@pytest.mark.parametrize(
    ("options", "weights", "expected"),
    [
        ({"image_mean": [0.5] * 3}, (), (None, "image processor")),
        ({}, ("visual.blocks.1.mlp.down_proj.weight",), (None, "vision tower")),
        pytest.param({}, ("layers.1.self_attn.q_proj.weight",), (1, "q projection"), marks=LONG),
    ],
)
def test_what_differs_is_named_before_all_that_inherits_it(model, tmp_path, options, weights, expected):
    rows = rows_of(model)
    values = transformers(changed(model, tmp_path / "other", options, weights), torch.float32, rows)
    report = report_of(model, values, rows)
    assert (report.first.site.layer, report.first.operator) == expected
    created = {site.operator for site in report.sites if site.is_created}
    assert created == {expected[1]}


def test_positions_of_text_in_an_engine_are_a_fault_of_rope(model, monkeypatch):
    rows = rows_of(model)
    given = "consistency.layers.observed.image_options"
    from consistency.layers import observed

    plain = observed.image_options

    def of_text(model, tokens, row):
        return plain(model, tokens, row) | {"position_ids": torch.arange(tokens.shape[1])[None]}

    monkeypatch.setattr(given, of_text)
    values = transformers(model, torch.float32, rows)
    monkeypatch.setattr(given, plain)
    assert report_of(model, values, rows).first.operator == "rope"


def test_verb_reads_prompts_with_images_and_says_what_to_compare(model, tmp_path):
    other = changed(model, tmp_path / "other", {"image_std": [0.2] * 3})
    rows = [{"messages": chat(len(seen)), "images": list(map(data_url, seen))} for seen in PICTURES]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", str(model), "--prompts", str(prompts), "--layers", f"transformers={other}"]
    done = invoke("consistency", *options)
    assert done.exit_code == 1, done.output
    assert done.output.startswith("Mismatch: image processor in Transformers with")
    assert "compare preprocessor_config.json on both sides" in done.output
