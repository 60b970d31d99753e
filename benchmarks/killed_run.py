"""The run that `kill_and_resume.py` kills.

METHOD (environment) is grpo, ppo, async or sft; options as in any run. STOP_AFTER is the last step.
`async` has asynchronous rollouts of a scripted engine, whose completions depend on the prompt
alone, not on the time of the request.
"""

import os
import sys

from areal_core.config import GRPOConfig, SFTConfig, load_expr_config
from areal_core.data import get_dataset
from areal_core.rollout.pipeline import Executor
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.workflow import RLVRWorkflow
from areal_core.testing import ScriptedEngine
from areal_core.trainer import build
from areal_core.trainer.live import LiveRollouts
from areal_core.trainer.rl import PPOTrainer
from areal_core.trainer.sft import SFTTrainer

SFT_ROWS = [{"input_ids": [5 + i, 6, 7, 8 + i % 3], "loss_mask": [0, 1, 1, 1]} for i in range(64)]


def even_share(prompt: str, completions: str, prompt_ids: list, completion_ids: list, **row: object) -> float:
    """Return the share of even token ids: about half for a random model, with a spread."""
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)


async def even_share_at_once(*arguments: object, **row: object) -> float:
    """Return `even_share`, computed without a reward process."""
    return even_share(*arguments, **row)


def scripted_ahead(trainer: PPOTrainer) -> LiveRollouts:
    """Return asynchronous rollouts that are the same in any order of sampling."""
    config, ranks = trainer.config, trainer.ranks
    batch_size = config.train_dataset.batch_size // ranks.data_parallel_size
    ahead = config.rollout.max_head_offpolicyness
    control = StalenessControl(batch_size, batch_size, ahead, num_steps=trainer.end_step)
    return LiveRollouts(
        Executor(ScriptedEngine(vocabulary_size=100), control),
        build.build_loader(config, ranks, trainer.train_dataset),
        RLVRWorkflow(even_share_at_once, config.gconfig, trainer.tokenizer),
        n_samples=config.gconfig.n_samples,
    )


def main(method: str) -> None:
    options_of_method = SFTConfig if method == "sft" else GRPOConfig
    config, _ = load_expr_config(sys.argv, options_of_method)
    last = int(os.environ.get("STOP_AFTER", config.total_train_steps - 1))
    if method == "sft":
        with SFTTrainer(config, SFT_ROWS) as trainer:
            trainer.train(stop=lambda step: step == last)
        return
    source = scripted_ahead if method == "async" else None
    with PPOTrainer(config, get_dataset(config.train_dataset), source=source, stop_after=last) as trainer:
        trainer.train(workflow_kwargs={"reward_fn": f"{__file__}:even_share"})


if __name__ == "__main__":
    main(os.environ["METHOD"])
