"""GRPO of a vision model: a picture, a question, several answers, a verifiable reward.

    areal-debug train examples/vision_grpo.py --config examples/vision_shapes.yaml --dump-rollout

Rows are those of clevr_count_70k, geometry3k, virl39k, generated shapes, or a file of your own with
`images`, a question and an answer (docs/vision.md).
"""

import sys

from areal_core.config import GRPOConfig
from areal_core.data import get_dataset
from areal_core.data.processor import load_processor
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import wire

REWARDS = {
    "clevr_count_70k": "areal_core.reward.functions.clevr_count_70k_reward_fn",
    "geometry3k": "areal_core.reward.functions.reasoned_reward_fn",
    "virl39k": "areal_core.reward.functions.reasoned_reward_fn",
}
EXACT = "areal_core.reward.functions.arithmetic_reward_fn"


def main(argv: list[str]) -> None:
    config, hooks = wire(argv, GRPOConfig)
    processor = load_processor(config.tokenizer_path or config.actor.path)
    data, path = config.train_dataset, config.train_dataset.path.lower()
    valid = config.valid_dataset and get_dataset(config.valid_dataset, processor=processor)
    with PPOTrainer(config, get_dataset(data, processor=processor), valid, **hooks) as trainer:
        trainer.train(
            workflow="areal_core.rollout.vision_workflow.VisionRLVRWorkflow",
            workflow_kwargs={
                "reward_fn": next((REWARDS[name] for name in REWARDS if name in path), EXACT),
                "gconfig": config.gconfig,
                "enable_thinking": False,
            },
        )


if __name__ == "__main__":
    main(sys.argv[1:])
