"""A student approaches its teacher."""

import random

import pytest

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
