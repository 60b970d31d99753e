"""Train a reward model or DPO on the ranks of this job.

Rank 0 prints the loss of each step and of the validation pairs as JSON.
"""

import json

from areal_core.paths import run_folder
from tests.trainer.supervised_config import METHODS, make_config

# Of unequal lengths, so that ranks need different numbers of micro-batches.
PAIRS = [
    {
        "chosen_ids": [5, 6, *range(7, 8 + i)],
        "rejected_ids": [5, 6, 60 + i],
        "chosen_loss_mask": [0, 0, *[1] * (i + 1)],
        "rejected_loss_mask": [0, 0, 1],
    }
    for i in range(11)
]


def main(method: str, model: str, folder: str, sizes: str) -> object:
    options = {"allocation_mode": f"fsdp:{sizes}", "actor.mb_spec.max_tokens_per_mb": 24}
    options |= {"total_train_epochs": 3, "evaluator.freq_steps": 1}
    config = make_config(method, folder, model, 4, options)
    # The last batch of nine validation pairs has one: the second rank has none of it.
    with METHODS[method][1](config, PAIRS, PAIRS[:9]) as trainer:
        trainer.train()
    steps = (run_folder(config, "logs") / "stats.jsonl").read_text().splitlines()
    return [
        json.loads(step)[name] for step in steps for name in (f"{method}/loss/avg", f"eval-{method}/loss/avg")
    ]
