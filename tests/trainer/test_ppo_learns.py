"""Values learn to predict returns, and a student approaches its teacher."""

import random

import pytest
import torch

from areal_core.config import PPOConfig, load_expr_config
from areal_core.paths import run_folder
from areal_core.rollout.workflow import RLVRWorkflow
from areal_core.telemetry.loggers import read_stats
from areal_core.testing import make_tiny_model, make_tiny_tokenizer
from areal_core.trainer.rl import PPOTrainer
from tests.trainer import critic_program

QUESTIONS = [{"messages": [{"role": "user", "content": f"{a}{b}"}], "answer": b} for a in range(10) for b in range(10)]  # fmt: skip


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("small"), hidden_size=32, num_layers=1)


def train_live(model, folder, reward, num_steps, *overrides):
    """Return the lines of stats.jsonl of a run whose engine answers until the first digit."""
    tokenizer = make_tiny_tokenizer()
    digits = tokenizer.convert_tokens_to_ids([str(digit) for digit in range(10)])
    rows = random.Random(0).sample(QUESTIONS, len(QUESTIONS))
    options = [
        *(f"cluster.fileroot={folder}", f"actor.path={model}", "total_train_epochs=10"),
        *("train_dataset.batch_size=16", "rollout.consumer_batch_size=16", f"total_train_steps={num_steps}"),
        *(
            "gconfig.max_new_tokens=4",
            f"gconfig.stop_token_ids={digits}",
            f"evaluator.freq_steps={num_steps}",
        ),
        *("evaluator.eval_before_train=true", "actor.use_decoupled_loss=false", "actor.optimizer.lr=3e-3"),
        *("actor.mb_spec.max_tokens_per_mb=4096", *overrides),
    ]
    config, _ = load_expr_config(["--config", str(critic_program.TINY), *options], PPOConfig)
    with PPOTrainer(config, rows[:80], rows[80:], print_steps=False) as trainer:
        trainer.train(RLVRWorkflow(reward, config.gconfig, tokenizer))
    return read_stats(run_folder(config, "logs") / "stats.jsonl")


class Predictable(critic_program.Conversations):
    """Rewards that depend on the prompt only."""

    def next_batch(self, step, version):
        batch = super().next_batch(step, version)
        is_good = batch["prompt_id"] % 2 == 0
        is_prompt = (batch["loss_mask"].cumsum(1) == 0) & batch["attention_mask"]
        token = torch.where(is_good, 5, 60)[:, None].int()
        return batch | {
            "input_ids": torch.where(is_prompt, token, batch["input_ids"]),
            "rewards": is_good.float(),
        }


@pytest.mark.long
def test_values_learn_to_predict_the_returns(small_model, tmp_path):
    overrides = [
        "actor.gae_lambda=1.0",
        "actor.discount=1.0",
        "critic.optimizer.type=adam",
        "critic.optimizer.lr=3e-3",
    ]
    measured = []
    observers = [critic_program.measure_into(measured)]
    with critic_program.build(
        small_model, tmp_path, 24, *overrides, observers=observers, rollouts=Predictable
    ) as trainer:
        trainer.train()
    explained = [step["ppo_critic/explained_variance"] for step in measured]
    losses = [step["ppo_critic/critic_loss/avg"] for step in measured]
    assert explained[0] == 0  # all values are 0
    assert min(explained[-3:]) > 0.8
    assert max(losses[-3:]) < 0.2 * losses[0]


async def nothing(*arguments, **row) -> float:
    return 0.0


@pytest.mark.long
def test_a_student_that_only_distils_nears_its_teacher(small_model, tmp_path):
    teacher = critic_program.make_teacher(tmp_path / "teacher", hidden_size=32, num_layers=1)
    options = [
        "algorithm=distill",
        f"teacher.path={teacher}",
        "teacher.rl_loss_weight=0",
        "teacher.distill_loss_weight=1",
    ]
    steps = train_live(small_model, tmp_path, nothing, 20, *options)
    distances = [step["ppo_actor/update/rkl_loss/avg"] for step in steps]
    assert distances[-1] < 0.7 * distances[0]
    assert all(
        step["ppo_actor/update/actor_loss/avg"] == 0 for step in steps
    )  # there is no reward to learn from
