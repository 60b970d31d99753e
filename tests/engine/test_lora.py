"""Adapters: trainable weights, saving and loading, and the base model as reference."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from areal_core.engine.checkpoint.distributed import load_checkpoint, save_checkpoint
from areal_core.engine.checkpoint.files import read_checkpoint_file
from areal_core.engine.checkpoint.hf_folder import save_hf
from areal_core.engine.lora import trained_parameters
from areal_core.engine.model import load_model
from areal_core.engine.scores import load_score_model
from areal_core.engine.sharding import full_tensor
from areal_core.trainer.build import build_engine
from areal_core.trainer.build_models import BaseReference
from tests.engine import lora_program as program
from tests.engine.steps_program import assert_same_steps

PROGRAM = Path(__file__).parent / "lora_program.py"


@pytest.fixture(scope="module")
def trained(ranks, tiny_model):
    """An engine after three steps. Not to be trained further."""
    return program.train(ranks, str(tiny_model))[0]


def logprobs_of(model, batch) -> torch.Tensor:
    """Compute logprobs of the tokens in the loss mask with Transformers, one row at a time."""
    found = []
    for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        ids = row[mask].long()[None]
        with torch.no_grad():
            found.append(
                model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            )
    return torch.cat(found)


def test_only_adapters_train_and_the_base_model_keeps_its_bits(ranks, trained, tiny_model):
    names = set(trained_parameters(trained.model))
    assert len(names) == 2 * 7 * 2  # A and B of seven layers in each of two blocks
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert {id(p) for group in trained.optimizer.param_groups for p in group["params"]} == {
        id(trained.model.get_parameter(name)) for name in names
    }
    assert set(trained.checksums()) == names
    files = load_model(str(tiny_model)).state_dict()
    for name, parameter in trained.model.named_parameters():
        if name not in names:
            assert torch.equal(full_tensor(parameter.detach()), files[name.replace(".base_layer.", ".")]), (
                name
            )


def test_the_reference_of_an_adapted_policy_is_an_engine_of_its_own_to_the_bit(ranks, trained, tiny_model):
    batch = program.rows()
    separate = build_engine(program.options_of(str(tiny_model), use_lora=False), ranks, 1)
    after = trained.compute_logprobs(batch)
    assert torch.equal(BaseReference(trained).compute_logprobs(batch), separate.compute_logprobs(batch))
    assert torch.equal(trained.compute_logprobs(batch), after)  # and the adapter is enabled again


def test_what_is_saved_is_what_was_trained_as_an_adapter_and_merged(ranks, trained, tiny_model, tmp_path):
    batch = program.rows()
    want = trained.compute_logprobs(batch)[batch["loss_mask"].bool()]
    save_hf(tmp_path / "adapter", trained)
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(logprobs_of(loaded, batch), want, rtol=0, atol=2e-6)
    save_hf(tmp_path / "merged", trained, merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(logprobs_of(merged, batch), want, rtol=0, atol=2e-6)


def test_a_checkpoint_contains_the_adapter_alone_and_training_continues_to_the_same_bits(
    ranks, tiny_model, tmp_path
):
    torch.manual_seed(7)
    engine = build_engine(program.options_of(str(tiny_model)), ranks, 10)
    batch = program.rows()
    program.train_step(engine, batch)
    save_checkpoint(tmp_path / "000001", {"actor": engine}, {})
    want = program.train_step(engine, batch)
    torch.manual_seed(8)  # another adapter, which the checkpoint replaces
    again = build_engine(program.options_of(str(tiny_model)), ranks, 10)
    load_checkpoint(tmp_path / "000001", {"actor": again})
    assert program.train_step(again, batch) == want
    files = sum(file.stat().st_size for file in (tmp_path / "000001" / "actor").iterdir())
    adapter = sum(parameter.numel() * 4 for parameter in trained_parameters(engine.model).values())
    assert adapter * 3 <= files < adapter * 3 + 40_000  # weights and two states of Adam, and their names
    assert read_checkpoint_file(tmp_path / "000001").engines["actor"].has_optimizer


@pytest.mark.long
def test_two_ranks_train_the_adapter_as_one_does(ranks, torchrun, tiny_model, tmp_path):
    _, alone = program.train(ranks, str(tiny_model))
    together = torchrun(PROGRAM, 2, tiny_model, tmp_path / "adapter")
    assert together["from_rank_0"] == together["steps"]  # to the bit: all ranks have rank 0's adapter
    assert_same_steps(together["steps"], alone)
    assert together["steps"][-1]["checksums"].keys() == alone[-1]["checksums"].keys()
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    PeftModel.from_pretrained(base, tmp_path / "adapter")


def test_a_reward_model_trains_its_adapter_and_its_complete_head(ranks, tiny_model, tmp_path):
    engine = build_engine(program.options_of(str(tiny_model)), ranks, 10, load=load_score_model)
    assert [name for name in trained_parameters(engine.model) if "lora" not in name] == ["score.weight"]
    batch = program.rows()
    for _ in range(2):
        engine.train_batch(
            batch, lambda scores, flat: ((scores - 1.0) ** 2).sum(), lambda part: part["attention_mask"].sum()
        )
    values = engine.compute_values(batch)
    save_hf(tmp_path, engine)
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    for row, mask, value in zip(batch["input_ids"], batch["attention_mask"], values, strict=True):
        with torch.no_grad():
            score = loaded(input_ids=row[mask].long()[None]).logits[0, 0]
        torch.testing.assert_close(score, value[mask.sum() - 1], rtol=0, atol=1e-5)
