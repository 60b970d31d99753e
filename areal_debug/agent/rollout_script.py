"""A rank of `areal-debug agent rollout`: the trainer with an agent as its workflow.

Run by areal_debug.train.script. The agent is `rollout.agent.agent_cls_path`; its constructor's
arguments are passed as JSON in the environment variable that `ARGUMENTS` names.
"""

import json
import os
import sys

ARGUMENTS = "AREAL_DEBUG_AGENT_ARGUMENTS"


def main(argv: list[str]) -> None:
    """Train with the agent as workflow, as the config defines."""
    from areal_core.config import GRPOConfig
    from areal_core.data import get_dataset
    from areal_core.trainer.build import load_tokenizer
    from areal_core.trainer.rl import PPOTrainer
    from areal_debug.wiring import wire

    config, hooks = wire(argv, GRPOConfig)
    dataset = get_dataset(config.train_dataset, tokenizer=load_tokenizer(config))
    with PPOTrainer(config, dataset, **hooks) as trainer:
        trainer.train(workflow_kwargs=json.loads(os.environ.get(ARGUMENTS, "{}")))


if __name__ == "__main__":
    main(sys.argv)
