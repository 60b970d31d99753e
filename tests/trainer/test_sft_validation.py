"""Validation of supervised fine-tuning: losses of the model's logits, at the configured steps."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_core.errors import MiscomputedError
from areal_core.paths import run_folder
from areal_core.testing.bit_flips import flip_bit
from areal_core.trainer.sft import SFTTrainer
from tests.trainer.supervised_config import make_config

TRAINING = [{"input_ids": [5, 6, *range(7, 9 + i)], "loss_mask": [0, 0, *[1] * (i + 2)]} for i in range(8)]
HELD_OUT = [
    {"input_ids": [5, 6, 40 + i, 50, 51][: 3 + i], "loss_mask": [0, 0, 1, 1, 1][: 3 + i]} for i in range(3)
]


@pytest.fixture
def train(tiny_model, in_process, tmp_path):
    """Train two steps in this process, and return the statistics of each."""

    def run(valid_dataset, prepare=lambda trainer: None, **options) -> list[dict[str, float]]:
        given = {name.replace("__", "."): value for name, value in options.items()}
        config = make_config("sft", tmp_path, tiny_model, 4, {"total_train_steps": 2} | given)
        with SFTTrainer(config, TRAINING, valid_dataset, join=in_process) as trainer:
            prepare(trainer)
            trainer.train()
        lines = (run_folder(config, "logs") / "stats.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


def test_a_step_that_is_computed_wrongly_once_stops_the_run(train):
    calls = []

    def flip(module, arguments, output):
        calls.append(output)
        if len(calls) == 3:  # the second step, the first computation
            flip_bit(output, 70, 30)

    def plant(trainer):
        trainer.actor.model.get_submodule("model.layers.1.mlp.up_proj").register_forward_hook(flip)

    runs = [train([], debug__verify_every=every)[-2:] for every in (None, 1)]
    plain, verified = ([(s["sft/loss/avg"], s["sft/grad_norm"]) for s in run] for run in runs)
    assert plain == verified
    with pytest.raises(MiscomputedError, match="step 1, actor, minibatch 0: rank 0") as raised:
        train([], debug__verify_every=1, prepare=plant)
    assert "output of model.layers.1.mlp.up_proj, element [0, 0, 70], bit 30" in str(raised.value)
    assert len(calls) == 5


def losses_per_row(model) -> list[float]:
    """Compute the mean negative log-likelihood of each validation completion by a forward pass."""
    losses = []
    for row in HELD_OUT:
        ids = torch.tensor([row["input_ids"]])
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
        losses.append(-logprobs[1:].mean().item())  # the prompt is two tokens
    return losses


def test_the_loss_before_training_is_that_of_the_models_logits(train, tiny_model):
    first, _ = train(HELD_OUT, evaluator__eval_before_train=True, evaluator__freq_steps=2)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        losses = losses_per_row(model)
    lengths = [1, 2, 3]
    mean = sum(loss * length for loss, length in zip(losses, lengths, strict=True)) / sum(lengths)
    scope = "eval-before-sft"
    assert first[f"{scope}/loss/avg"] == pytest.approx(mean, rel=1e-5)
    assert first[f"{scope}/ppl/avg"] == pytest.approx(sum(map(math.exp, losses)) / 3, rel=1e-5)
    counts = {
        name: first[f"{scope}/{name}"] for name in ("n_seqs", "n_tokens", "n_valid_tokens", "prompt_tokens")
    }
    assert counts == {"n_seqs": 3, "n_tokens": 12, "n_valid_tokens": 6, "prompt_tokens": 6}
