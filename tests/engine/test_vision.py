"""Vision models in the engine: log-probs and gradients are those of Transformers' own forward."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from areal_core.batch import select_rows
from areal_core.testing import step_with_gradients
from areal_core.vision.inputs import plain_inputs
from areal_core.vision.processor import load_processor
from areal_core.vision.tiny_models import VISION_FAMILIES, make_tiny_vision_model

PROGRAM = Path(__file__).parent / "vision_program.py"
spec = importlib.util.spec_from_file_location("vision_program", PROGRAM)
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision_models")
    return {family: str(make_tiny_vision_model(folder / family, family)) for family in VISION_FAMILIES}


def transformers_of(folder: str) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Return loss, log-probs [rows, T] and gradients by the class's own forward, one row at a time."""
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    processor = load_processor(folder)
    batch = program.rows(processor)
    logprobs = torch.zeros(batch["input_ids"].shape)
    loss, count = torch.zeros(()), int(batch["loss_mask"].sum())
    for number in range(len(program.PICTURES)):
        row = select_rows(batch, [number])
        ids, types = row["input_ids"][0].long(), row["mm_token_type_ids"][0].long()
        pixels = processor.pixels([program.picture(*size) for size in program.PICTURES[number]])
        log_p = model(ids[None], **plain_inputs(model, types, pixels)).logits[0].log_softmax(-1)
        at_label = log_p[:-1].gather(1, ids[1:, None])[:, 0]
        trained = row["loss_mask"][0, :-1].bool()
        entropy = -(log_p.exp() * log_p).sum(-1)[:-1]
        loss = loss - (at_label + 0.1 * entropy)[trained].sum()
        logprobs[number, : len(at_label)] = at_label.detach() * trained
    (loss / count).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item() / count, logprobs, gradients


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare gradients, each to 1e-5 of its largest element."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * max(largest, 1e-3), msg=name)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_logprobs_and_gradients_are_those_of_transformers(family, models, ranks):
    loss, logprobs, expected = transformers_of(models[family])
    engine = program.make_engine(ranks, models[family])
    batch = program.rows(engine.vision.processor)
    found = engine.compute_logprobs(batch)
    torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-5)
    result, gradients = step_with_gradients(engine, batch)
    assert len(result.micro_batches) == 2
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert_close(gradients, expected)


@pytest.mark.parametrize(
    ("family", "num_ranks", "sequence_parallel", "freezes"),
    [
        ("qwen3_vl", 2, 1, False),
        ("qwen3_vl", 2, 2, False),
        ("gemma3", 2, 2, False),
        ("gemma3", 2, 1, True),
        ("qwen2_vl", 2, 2, True),
        ("qwen2_5_vl", 2, 1, False),
    ],
)
def test_two_ranks_train_as_transformers_does(
    family, num_ranks, sequence_parallel, freezes, models, torchrun, tmp_path
):
    # Data-parallel rank 1 has no picture: it runs the tower all the same.
    loss, logprobs, expected = transformers_of(models[family])
    found = torchrun(PROGRAM, num_ranks, models[family], sequence_parallel, tmp_path / "gradients", freezes)
    own = slice(None) if sequence_parallel == 2 else slice(0, None, 2)
    mine = logprobs[own][:, : len(found["logprobs"][0])]
    torch.testing.assert_close(torch.tensor(found["logprobs"]), mine, rtol=0, atol=1e-5)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    if freezes:
        expected = {n: g for n, g in expected.items() if "language_model" in n or n.startswith("lm_head")}
    assert_close(load_file(tmp_path / "gradients"), expected)
