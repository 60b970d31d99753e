"""Runs that stop: of two ranks, of which one has the row that is broken; and supervised ones.

Arguments: folder, model folder, allocation of the trainer, what is broken.
"""

import math
from pathlib import Path

from areal_core.config import RWConfig, SFTConfig, config_from_dict
from areal_core.errors import NonFiniteError
from areal_core.trainer.reward_model import RWTrainer
from areal_core.trainer.rl import PPOTrainer
from areal_core.trainer.sft import SFTTrainer

from .conftest import EditedRollouts, tiny_config

MARKED = 104  # a token that no other row has
TEXT = "~abc"
METHODS = {"sft": (SFTConfig, SFTTrainer), "rw": (RWConfig, RWTrainer)}


def break_output(module, inputs, output):
    return output.masked_fill((inputs[0] == MARKED)[..., None], math.nan)


def break_gradient(module, inputs, output):
    if output.requires_grad:
        at = (inputs[0] == MARKED)[..., None]
        output.register_hook(lambda gradient: gradient.masked_fill(at, math.inf))


def main(folder: str, model: str, allocation: str, broken: str) -> object:
    changes = {"allocation_mode": f"embedded|fsdp:{allocation}", "actor__use_decoupled_loss": False}

    def mark(batch, step):
        batch["input_ids"][3, 0] = MARKED
        return batch

    def source(trainer):
        is_last = trainer.ranks.data_parallel_rank == trainer.ranks.data_parallel_size - 1
        return EditedRollouts(mark if is_last else lambda batch, step: batch, MARKED, num_prompts=2)

    config = tiny_config(Path(folder), model, 2, **changes)
    with PPOTrainer(config, source=source, total_steps=2, print_steps=False) as trainer:
        trainer.actor.model.get_input_embeddings().register_forward_hook(HOOKS[broken])
        message = ""
        try:
            trainer.train()
        except NonFiniteError as error:
            message = str(error)
        return trainer.ranks.gather_objects(message)


HOOKS = {"log-prob": break_output, "gradient": break_gradient}


def train_supervised(folder: Path, model: Path, method: str) -> str:
    tree = {
        "experiment_name": "tiny",
        "trial_name": "test",
        "device": "cpu",
        "cluster": {"fileroot": str(folder)},
        "train_dataset": {"path": "arithmetic", "type": method, "batch_size": 2, "shuffle": False},
        "actor": {"path": str(model), "dtype": "float32", "optimizer": {"lr": 1e-3}},
    }
    rows = [{"input_ids": [10 + row, 11, 12, 13], "loss_mask": [0, 1, 1, 1]} for row in range(8)]
    name = "input"
    if method == "rw":
        sides, name = ("chosen", "rejected"), "chosen"
        rows = [
            {
                f"{side}_{key.removeprefix('input_')}": list(value)
                for side in sides
                for key, value in row.items()
            }
            for row in rows
        ]
    config_class, trainer_class = METHODS[method]
    with trainer_class(config_from_dict(tree, config_class), rows) as trainer:
        rows[4][f"{name}_ids"] = trainer.tokenizer(TEXT)["input_ids"]
        trainer.actor.model.get_input_embeddings().register_forward_hook(break_output)
        try:
            trainer.train()
        except NonFiniteError as error:
            return str(error)
    return ""
