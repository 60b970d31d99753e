"""The plan of a run with a critic: its memory and optimizer steps."""

from pathlib import Path

from areal_core.config import PPOConfig, load_expr_config
from areal_debug.dry_run.plan import plan_run

TINY = Path(__file__).parents[1] / "debug" / "tiny.yaml"
NUM_PARAMETERS = 129_920  # of the tiny model, whose output layer is its embedding; a head of values adds 64


def test_a_critic_is_planned_next_to_the_actor(tiny_model, tmp_path):
    options = [f"cluster.fileroot={tmp_path}", f"actor.path={tiny_model}", "saver.freq_steps=1"]
    options += ["algorithm=ppo", "critic.ppo_n_minibatches=4", "critic.mb_spec.max_tokens_per_mb=128"]
    config, _ = load_expr_config(["--config", str(TINY), *options], PPOConfig)
    run = plan_run(Path("train.py"), str(TINY), config, [])
    sizes = {part.name: part.size_bytes for part in run.memory.rank}
    assert sizes["actor: masters"] == 4 * NUM_PARAMETERS
    assert sizes["critic: masters"] == sizes["critic: gradients"] == 4 * (NUM_PARAMETERS + 64)
    assert sizes["critic: optimizer"] == 2 * sizes["critic: masters"]
    assert run.update.startswith(
        "2 optimizer steps over 16 sequences per rank, in micro-batches of at most 64 tokens"
    )
