"""A supervised run that only evaluates: its losses against Transformers' own, and its refusals."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from areal_core.config import DPOConfig, RWConfig, SFTConfig, config_from_dict
from areal_core.paths import run_folder
from areal_core.trainer.dpo import DPOTrainer
from areal_core.trainer.reward_model import RWTrainer
from areal_core.trainer.sft import SFTTrainer

ROWS = [
    {"input_ids": [5, 6, 40 + i, 50, 51, 52][: 3 + i], "loss_mask": [0, 0, 1, 1, 1, 1][: 3 + i]}
    for i in range(3)
]
PAIRS = [
    {
        "chosen_ids": [5, 6, 40 + i, 50], "chosen_loss_mask": [0, 0, 1, 1],
        "rejected_ids": [5, 6, 60, 61, 62 + i], "rejected_loss_mask": [0, 0, 1, 1, 1],
    }
    for i in range(5)
]  # fmt: skip
NAMES = {"experiment_name": "e", "trial_name": "t"}
METHODS = {SFTTrainer: (SFTConfig, "sft"), DPOTrainer: (DPOConfig, "dpo"), RWTrainer: (RWConfig, "rw")}


@pytest.fixture
def evaluate(in_process, tmp_path):
    """Evaluate in this process; return the summary and the lines of each model."""

    def run(trainer, rows, model, checkpoints, **evaluator) -> tuple[dict, list[list[dict]]]:
        cls, kind = METHODS[trainer]
        actor = {"path": str(model), "dtype": "float32", "mb_spec": {"max_tokens_per_mb": 12}}
        tree = NAMES | {
            "actor": actor | {"optimizer": {"lr": 1e-3}},
            "train_dataset": {"path": "none", "type": kind, "batch_size": 2},
            "evaluator": {"checkpoints": [str(path) for path in checkpoints], **evaluator},
            "allocation_mode": "fsdp:d1|eval", "device": "cpu", "cluster": {"fileroot": str(tmp_path)},
        }  # fmt: skip
        config = config_from_dict(tree, cls)
        with trainer(config, rows[:1], rows, join=in_process) as made:
            made.train()
        folder = run_folder(config, "logs") / "evaluation"
        summary = json.loads((folder / "evaluation.json").read_text())
        files = [(folder / item["file"]).read_text().splitlines() for item in summary["models"]]
        return summary, [[json.loads(line) for line in lines] for lines in files]

    return run


def logprobs_of(model: Path, ids: list[int]) -> torch.Tensor:
    """Return the log-prob of each token after the first, by Transformers alone."""
    with torch.no_grad():
        logits = (
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            .eval()(torch.tensor([ids]))
            .logits[0, :-1]
        )
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]


def test_losses_of_rows_are_those_of_the_models_logits(evaluate, random_model, tmp_path):
    models = [random_model(tmp_path / name, seed) for seed, name in enumerate(("first", "second"))]
    summary, of_models = evaluate(SFTTrainer, ROWS, models[0], models)
    assert (summary["method"], summary["rows"], summary["num_rows"]) == ("sft", "valid", 3)
    for model, lines in zip(models, of_models, strict=True):
        assert [line["row_id"] for line in lines] == [0, 1, 2]
        assert [line["num_tokens"] for line in lines] == [1, 2, 3]
        expected = [-logprobs_of(model, row["input_ids"])[1:].mean().item() for row in ROWS]
        assert [line["loss"] for line in lines] == pytest.approx(expected, abs=1e-5)
    first, second = of_models
    assert [line["row_sha256"] for line in first] == [line["row_sha256"] for line in second]
    assert [line["loss"] for line in first] != [line["loss"] for line in second]


def test_pairs_are_measured_against_the_initial_model(evaluate, random_model, tmp_path):
    base, other = (random_model(tmp_path / name, seed) for seed, name in enumerate(("base", "other")))
    summary, [of_base, of_other] = evaluate(DPOTrainer, PAIRS, base, [base, other], max_rows=4)
    assert (summary["method"], summary["num_rows"], len(of_base)) == ("dpo", 4, 4)
    for line in of_base:  # the reference itself
        assert (line["loss"], line["margin"], line["accuracy"]) == (pytest.approx(math.log(2)), 0.0, 0.0)
    for line, pair in zip(of_other, PAIRS, strict=False):
        sides = [
            (logprobs_of(other, pair[side])[1:] - logprobs_of(base, pair[side])[1:]).sum().item()
            for side in ("chosen_ids", "rejected_ids")
        ]
        margin = 0.1 * (sides[0] - sides[1])
        assert line["margin"] == pytest.approx(margin, abs=1e-5)
        assert line["accuracy"] == float(margin > 0)
        assert line["loss"] == pytest.approx(math.log(1 + math.exp(-margin)), abs=1e-5)


def test_a_reward_model_has_the_margin_of_its_scores(evaluate, tiny_model, tmp_path):
    torch.manual_seed(0)
    made = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
    made.save_pretrained(tmp_path / "scorer")
    _, [untrained, trained] = evaluate(RWTrainer, PAIRS, tiny_model, [tiny_model, tmp_path / "scorer"])
    assert [line["margin"] for line in untrained] == [0.0] * 5  # a new head is zero
    made.config.pad_token_id = None  # one row at a time: its last token
    with torch.no_grad():
        scores = [
            [made(torch.tensor([pair[side]])).logits.item() for side in ("chosen_ids", "rejected_ids")]
            for pair in PAIRS
        ]
    assert [line["margin"] for line in trained] == pytest.approx([a - b for a, b in scores], abs=1e-5)
    assert [line["accuracy"] for line in trained] == [float(a > b) for a, b in scores]
