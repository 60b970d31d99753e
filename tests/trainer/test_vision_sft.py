"""Supervised fine-tuning on pictures: the answer is in the picture alone."""

from io import BytesIO

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from areal_core.config import SFTConfig
from areal_core.config.train_engine import OptimizerConfig
from areal_core.data.processor import load_processor
from areal_core.engine.vision_models import plain_inputs
from areal_core.paths import run_folder
from areal_core.testing.tiny_vision import make_tiny_vision_model
from areal_core.trainer import build, supervised
from areal_core.trainer.sft import SFTTrainer

COLOURS = {"red": (230, 20, 20), "blue": (20, 20, 230)}
MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Colour?"}]}]


def picture(colour: str) -> bytes:
    file = BytesIO()
    Image.new("RGB", (16, 16), COLOURS[colour]).save(file, "PNG")
    return file.getvalue()


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "freezes"), [("qwen2_5_vl", False), pytest.param("gemma3", True, marks=pytest.mark.long)]
)
def test_a_model_learns_what_only_the_picture_shows(family, freezes, ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "start_process", lambda config: ranks)
    monkeypatch.setattr(supervised, "leave_ranks", lambda: None)
    folder = str(make_tiny_vision_model(tmp_path / "model", family))
    processor = load_processor(folder)
    rows = []
    for colour in COLOURS:
        prompt = processor.prompt(MESSAGES, [picture(colour)])
        answer = processor.tokenizer.encode(colour[0], add_special_tokens=False)
        rows.append(
            {
                "input_ids": prompt.input_ids + answer,
                "loss_mask": [0] * len(prompt.input_ids) + [1] * len(answer),
                "mm_token_type_ids": prompt.mm_token_type_ids + [0] * len(answer),
                "images": [picture(colour)],
            }
        )
    config = SFTConfig(experiment_name="e", trial_name="t", total_train_steps=25, total_train_epochs=25)
    config.cluster.fileroot, config.allocation_mode = str(tmp_path), "fsdp:d1"
    config.actor.path, config.actor.dtype, config.actor.freeze_vision_tower = folder, "float32", freezes
    config.actor.optimizer = OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0)
    config.train_dataset.batch_size = 2
    with SFTTrainer(config, rows) as trainer:
        before = {name: tensor.clone() for name, tensor in trainer.actor.named_full_tensors()}
        trainer.train()
        after = dict(trainer.actor.named_full_tensors())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("vision_tower" in name or "visual" in name for name in changed) == (not freezes)

    saved = run_folder(config, "checkpoints") / "default" / "final"
    model, again = (
        AutoModelForImageTextToText.from_pretrained(saved, dtype="float32"),
        load_processor(str(saved)),
    )
    for colour in COLOURS:
        prompt = again.prompt(MESSAGES, [picture(colour)])
        options = plain_inputs(model, torch.tensor(prompt.mm_token_type_ids), again.pixels([picture(colour)]))
        with torch.no_grad():
            best = int(model(torch.tensor([prompt.input_ids]), **options).logits[0, -1].argmax())
        assert again.tokenizer.decode([best]) == colour[0]
