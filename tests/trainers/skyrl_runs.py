"""Two steps of SkyRL's own trainer, in SkyRL's environment; prints what it trained on, as JSON.

    skyrl_runs.py FOLDER [--kl]

Real are the trainer's loop, its batches, advantages and callbacks. Generation is given, and the
workers compute what needs no model.
"""

import asyncio
import itertools
import json
import sys
from types import SimpleNamespace

import numpy as np
import torch
from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput
from skyrl.train.config import GeneratorConfig, SkyRLTrainConfig, TrainerConfig
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.callbacks import TrainingCallback

from areal_debug.skyrl import Record

GROUP, PROMPTS = 2, 2


class Prompts:
    """A dataset of prompts as SkyRL's loader takes them."""

    def __len__(self) -> int:
        return 2 * PROMPTS

    def __getitem__(self, index: int):
        return {
            "prompt": [{"role": "user", "content": f"q{index}"}],
            "env_class": None,
            "env_extras": {},
            "uid": str(index),
        }

    def collate_fn(self, items):
        return items


class Generator:
    """Given episodes, with a tool's answer in each."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    async def generate(self, batch):
        rng, count = self.rng, len(batch["prompts"])
        responses = [rng.integers(1, 50, int(rng.integers(4, 9))).tolist() for _ in range(count)]
        prompts = [rng.integers(1, 50, 3 + row // GROUP).tolist() for row in range(count)]
        masks = [[1, 0, 0] + [1] * (len(response) - 3) for response in responses]
        experts = [
            rng.integers(0, 8, (len(prompt) + len(response) - 1, 2, 2)).astype(np.uint8)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        return {
            "prompt_token_ids": prompts,
            "response_ids": responses,
            "rewards": [float(reward) for reward in rng.random(count).astype(np.float32)],
            "loss_masks": masks,
            "stop_reasons": ["stop", "length", None, "other"],
            "rollout_metrics": {},
            "rollout_logprobs": [
                (-rng.random(len(mask)) * mask).astype(np.float32).tolist() for mask in masks
            ],
            "rollout_expert_indices": experts,
            "trajectory_ids": None,
            "is_last_step": None,
        }


class Dispatch:
    """What the trainer asks its workers for."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)
        # first for the prompts of a step, then for its rows: SkyRL pads them with copies
        self.divisors = itertools.cycle((1, 3))

    def __getattr__(self, name: str):
        return lambda *_, **__: None

    def get_lcm_dp_size(self) -> int:
        return next(self.divisors)

    def get_timing_metrics(self):
        return {}

    async def save_weights_for_sampler(self) -> None:
        pass

    def forward(self, model: str, data) -> WorkerOutput:
        width, key = data.metadata["response_length"], "values" if model == "critic" else "logprobs"
        rows = [{key: (-self.rng.random(width)).tolist()} for _ in range(len(data["sequences"]))]
        return WorkerOutput(loss_fn_outputs=rows, metrics={})

    def stage_data(self, model: str, data, boundaries):
        return list(boundaries)

    def forward_backward_from_staged(self, model: str, chunk):
        return SimpleNamespace(metrics={"policy_loss": 0.25})

    def optim_step(self, model: str) -> float:
        return 1.5


class Truth(TrainingCallback):
    """Keeps what the trainer trained on, from its own hands."""

    def __init__(self) -> None:
        self.steps: list[dict] = []

    def on_step_end(self, trainer, callback_input, control) -> None:
        batch = callback_input.batch
        self.steps[-1] |= {
            name: batch[name].tolist()
            for name in ("sequences", "attention_mask", "response_mask", "action_log_probs", "returns")
        }
        self.steps[-1]["scaled_advantages"] = batch["advantages"].tolist()
        self.steps[-1]["pad_size"] = batch.metadata["pad_size"]


def run(folder: str) -> list[dict]:
    """Train two steps."""
    trainer_config = TrainerConfig(
        train_batch_size=PROMPTS, policy_mini_batch_size=PROMPTS, epochs=1, resume_mode="none"
    )
    trainer_config.algorithm.advantage_estimator = "grpo"
    trainer_config.algorithm.use_kl_in_reward = "--kl" in sys.argv
    trainer_config.ckpt_interval = trainer_config.eval_interval = trainer_config.hf_save_interval = 0
    trainer_config.placement.colocate_all = trainer_config.recompute_old_logprobs_per_minibatch = False
    config = SkyRLTrainConfig(trainer=trainer_config, generator=GeneratorConfig(n_samples_per_prompt=GROUP))
    config.generator.inference_engine.enable_ray_prometheus_stats = False
    config.data.dataloader.num_workers = 0
    truth = Truth()
    trainer = RayPPOTrainer(
        config,
        tracker=SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None),
        tokenizer=SimpleNamespace(pad_token_id=0, eos_token_id=1, decode=str, name_or_path=""),
        train_dataset=Prompts(),
        inference_engine_client=None,
        generator=Generator(),
        callbacks=[Record(folder), truth],
    )
    trainer.dispatch, trainer.ref_model = Dispatch(), object()
    trainer.init_weight_sync_state = lambda: None
    converted, computed = trainer.convert_to_training_input, trainer.compute_advantages_and_returns

    def convert(generator_output, uids):
        names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "stop_reasons")
        step = {name: generator_output[name] for name in names} | {"uids": list(uids)}
        step["rewards"] = [sum(row) for row in generator_output["rewards"]]
        step["experts"] = [row.tolist() for row in generator_output["rollout_expert_indices"]]
        truth.steps.append(step)
        return converted(generator_output, uids)

    def compute(data):
        result = computed(data)
        truth.steps[-1]["advantages"] = result["advantages"].tolist()
        return result

    trainer.convert_to_training_input, trainer.compute_advantages_and_returns = convert, compute
    asyncio.run(trainer.train())
    return truth.steps


if __name__ == "__main__":
    torch.manual_seed(0)
    print("SEEN " + json.dumps(run(sys.argv[1])))
