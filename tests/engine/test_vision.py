"""Vision models in the engine: log-probs and gradients are those of Transformers' own forward."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, SmolVLMConfig

from areal_core.data.batch import select_rows
from areal_core.data.processor import load_processor
from areal_core.engine.checkpoint.distributed import load_checkpoint, save_checkpoint
from areal_core.engine.checkpoint.hf_folder import save_hf
from areal_core.engine.lora import trained_parameters
from areal_core.engine.model import load_model
from areal_core.engine.parity import measure_parity
from areal_core.engine.tensor_parallel import check_tensor_parallel
from areal_core.engine.vision_models import plain_inputs
from areal_core.errors import ModelError
from areal_core.testing import step_with_gradients
from areal_core.testing.tiny_vision import VISION_FAMILIES, make_tiny_vision_model
from areal_core.trainer.batches import next_token_aligned, rows_to_batch
from tests.engine import vision_program as program

PROGRAM = Path(__file__).parent / "vision_program.py"
QUICK = ("qwen2_5_vl", "gemma3")
FAMILIES = [pytest.param(name, marks=[pytest.mark.long] * (name != QUICK[0])) for name in VISION_FAMILIES]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of each family, written when it is asked for."""
    folder = tmp_path_factory.mktemp("vision_models")

    class Models(dict):
        def __missing__(self, family):
            self[family] = str(make_tiny_vision_model(folder / family, family))
            return self[family]

    return Models()


def transformers_of(folder: str) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Return loss, log-probs [rows, T] and gradients by the class's own forward, row by row."""
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


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_transformers(family, models, ranks):
    loss, logprobs, expected = transformers_of(models[family])
    engine = program.make_engine(ranks, models[family])
    batch = program.rows(engine.processor)
    found = engine.compute_logprobs(batch)
    torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-5)
    result, gradients = step_with_gradients(engine, batch)
    assert len(result.micro_batches) == 2
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert_close(gradients, expected)


@pytest.mark.parametrize(
    ("family", "num_ranks", "sequence_parallel", "freezes"),
    [
        pytest.param("qwen3_vl", 2, 2, False, marks=pytest.mark.long),
        pytest.param("qwen3_vl", 2, 1, False, marks=pytest.mark.long),
        pytest.param("gemma3", 2, 2, False, marks=pytest.mark.long),
        pytest.param("gemma3", 2, 1, True, marks=pytest.mark.long),
        pytest.param("qwen2_vl", 2, 2, True, marks=pytest.mark.long),
        pytest.param("qwen2_5_vl", 2, 1, False, marks=pytest.mark.long),
    ],
)
def test_two_ranks_train_as_transformers_does(
    family, num_ranks, sequence_parallel, freezes, models, torchrun, tmp_path
):
    # Data-parallel rank 1 has no picture: it runs the tower all the same.
    loss, logprobs, expected = transformers_of(models[family])
    found = torchrun(
        PROGRAM, num_ranks, models[family], sequence_parallel, tmp_path / "gradients", freezes, timeout_s=400
    )
    own = slice(None) if sequence_parallel == 2 else slice(0, None, 2)
    mine = logprobs[own][:, : len(found["logprobs"][0])]
    torch.testing.assert_close(torch.tensor(found["logprobs"]), mine, rtol=0, atol=1e-5)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    if freezes:
        expected = {n: g for n, g in expected.items() if "language_model" in n or n.startswith("lm_head")}
    assert_close(load_file(tmp_path / "gradients"), expected)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_sampled_placeholder_is_no_picture(family, models, ranks):
    engine = program.make_engine(ranks, models[family])
    processor = engine.processor
    answer = [30, processor.image_token_id, 31, 32]
    row = program.row(processor, [(20, 20)], answer)
    found = engine.compute_logprobs(row)[0, -len(answer) - 1 : -1]
    # Transformers reads it as a token that generation appends to the prompt.
    model = load_model(models[family], attn_implementation="sdpa")
    ids, types = row["input_ids"][0].long(), row["mm_token_type_ids"][0].long()
    prompt = len(ids) - len(answer)
    options = plain_inputs(model, types[:prompt], processor.pixels([program.picture(20, 20)]))
    with torch.no_grad():
        read = model(ids[None, :prompt], use_cache=True, **options)
        logits = [read.logits[0, -1:]]
        for token in answer[:-1]:
            read = model(torch.tensor([[token]]), past_key_values=read.past_key_values, use_cache=True)
            logits.append(read.logits[0])
    expected = torch.cat(logits).log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_training_on_text_alone_leaves_the_tower_as_it_is(models, ranks, tmp_path):
    engine = program.make_engine(ranks, models["gemma3"])
    before = engine.checksums()
    every = program.rows(engine.processor)
    engine.train_batch(select_rows(every, [1, 3]), program.likelihood, program.weight)
    after = engine.checksums()
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {name for name in before if ".language_model." in name}
    # Its optimizer has no state yet: a checkpoint of that moment continues to the same bits.
    save_checkpoint(tmp_path / "checkpoint", {"actor": engine}, {})
    found = engine.train_batch(every, program.likelihood, program.weight), engine.checksums()
    load_checkpoint(tmp_path / "checkpoint", {"actor": engine})
    again = engine.train_batch(every, program.likelihood, program.weight), engine.checksums()
    assert again == found
    assert all(found[1][name] != before[name] for name in before)


def test_a_model_whose_pictures_are_computed_differently_fails_parity(models, ranks, monkeypatch):
    engine = program.make_engine(ranks, models["qwen2_5_vl"])
    assert measure_parity(engine).packs_rows
    positions = type(engine.vision)._positions
    monkeypatch.setattr(type(engine.vision), "_positions", lambda *args: positions(*args) + 1)
    parity = measure_parity(engine)
    assert (parity.is_equal, parity.packs_rows) == (True, True)  # rotary positions are relative
    monkeypatch.setattr(type(engine.vision), "_positions", lambda *args: positions(*args) * 0)
    assert not measure_parity(engine).is_equal


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_is_saved_with_the_names_and_processor_of_its_checkpoint(
    family, models, ranks, tmp_path
):
    engine = program.make_engine(ranks, models[family])
    assert engine.packs_rows
    folder = tmp_path / "saved"
    save_hf(folder, engine)
    names = load_file(Path(models[family]) / "model.safetensors")
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == names.keys() == dict(engine.named_full_tensors()).keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in names.items())
    assert load_processor(str(folder)).identity() == engine.processor.identity()


def test_adapters_go_to_the_text_model(models, ranks):
    options = {"use_lora": True, "lora_rank": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    engine = program.make_engine(ranks, models["gemma3"], **options)
    trained = trained_parameters(engine.model)
    assert len(trained) == 4  # two layers
    assert all(".language_model." in name for name in trained)
    batch = program.rows(engine.processor)
    before = engine.compute_logprobs(batch)
    engine.train_batch(batch, program.likelihood, program.weight)
    assert not torch.equal(engine.compute_logprobs(batch), before)
    assert (
        dict(engine.named_full_tensors()).keys()
        == load_file(Path(models["gemma3"]) / "model.safetensors").keys()
    )


def test_other_families_and_tensor_parallel_ranks_are_refused(models, tmp_path):
    SmolVLMConfig(vision_config={"hidden_size": 32}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is a vision model of type 'smolvlm', which is not supported"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match="tensor parallelism does not support 'qwen2_5_vl' models"):
        check_tensor_parallel(AutoConfig.from_pretrained(models["qwen2_5_vl"]), 2)


def test_rows_of_supervised_data_have_the_keys_of_pictures(models):
    processor = load_processor(models["qwen2_5_vl"])
    want = program.rows(processor)
    rows = [
        {
            "input_ids": row["input_ids"][0].tolist(),
            "loss_mask": [0, *row["loss_mask"][0, :-1].tolist()],
            "mm_token_type_ids": row["mm_token_type_ids"][0].tolist(),
            "images": [program.picture(*size) for size in sizes],
        }
        for sizes, row in ((sizes, program.row(processor, sizes)) for sizes in program.PICTURES)
    ]
    del rows[1]["images"], rows[1]["mm_token_type_ids"]  # a row of text among them
    found = next_token_aligned(rows_to_batch(rows, has_images=True))
    assert found.keys() == want.keys()
    assert all(torch.equal(found[key], want[key]) for key in want)
    assert rows_to_batch([], has_images=True).keys() == want.keys()
    with pytest.raises(ValueError, match=r"a row has images and actor\.path is a text model"):
        rows_to_batch(rows)
