"""Train a reward model or DPO on the ranks of this job.

Rank 0 prints the loss of each step and of the validation pairs as JSON.
"""

import json

from areal_core.config import DPOConfig, RWConfig
from areal_core.config.train_engine import OptimizerConfig
from areal_core.paths import run_folder
from areal_core.trainer.dpo import DPOTrainer
from areal_core.trainer.reward_model import RWTrainer

METHODS = {"dpo": (DPOConfig, DPOTrainer), "rw": (RWConfig, RWTrainer)}
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
    config_class, trainer_class = METHODS[method]
    config = config_class(experiment_name="e", trial_name="t", device="cpu", allocation_mode=f"fsdp:{sizes}")
    config.cluster.fileroot = folder
    config.actor.path, config.actor.dtype, config.actor.mb_spec.max_tokens_per_mb = model, "float32", 24
    config.actor.optimizer = OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0)
    config.train_dataset.batch_size, config.total_train_epochs = 4, 3
    config.evaluator.freq_steps = 1
    # The last batch of nine validation pairs has one: the second rank has none of it.
    with trainer_class(config, PAIRS, PAIRS[:9]) as trainer:
        trainer.train()
    steps = (run_folder(config, "logs") / "stats.jsonl").read_text().splitlines()
    return [
        json.loads(step)[name] for step in steps for name in (f"{method}/loss/avg", f"eval-{method}/loss/avg")
    ]
