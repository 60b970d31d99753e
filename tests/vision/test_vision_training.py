"""GRPO on pictures with the embedded engine, by the example's own file, shortened."""

from pathlib import Path

import pytest

from areal_core.config import GRPOConfig, load_expr_config
from areal_core.data import get_dataset
from areal_core.testing.tiny_vision import make_tiny_vision_model
from areal_core.trainer.rl import PPOTrainer

ROOT = Path(__file__).parents[2]
REWARDS = ROOT / "tests" / "debug" / "rewards.py"
UPSTREAM = "areal.workflow.vision_rlvr.VisionRLVRWorkflow"


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.long)])
def test_each_step_samples_with_the_log_probs_that_it_trains_on(tmp_path, family):
    options = [
        *("--config", str(ROOT / "examples" / "vision_shapes.yaml"), f"cluster.fileroot={tmp_path}"),
        f"actor.path={make_tiny_vision_model(tmp_path / 'model', family)}",
        *("total_train_steps=2", "train_dataset.batch_size=2", "rollout.consumer_batch_size=2"),
        *("gconfig.n_samples=2", "actor.reward_norm.group_size=2", "actor.ppo_n_minibatches=1"),
        *("evaluator.freq_steps=null", "evaluator.eval_before_train=false", "valid_dataset=null"),
        *("actor.recompute_logprob=true", "actor.use_decoupled_loss=true", "train_dataset.shuffle=false"),
    ]
    config, _ = load_expr_config(options, GRPOConfig)
    rows, differences, pictures = get_dataset(config.train_dataset), [], []

    def watch(trainer):
        def observe(event, **facts):
            if event == "batch":
                batch = facts["batch"]
                assert batch["image_count"].tolist() == [1] * 4
                ends = batch["image_bytes"].cumsum(0).tolist()
                data = batch["image_data"].numpy().tobytes()
                pictures.extend(data[a:b] for a, b in zip([0, *ends], ends, strict=False))
            if event == "advantages":
                inputs = facts["inputs"]
                trained = inputs["loss_mask"].bool()
                difference = (inputs["prox_logp"] - inputs["logprobs"])[trained]
                differences.append(float(difference.abs().max()))

        return observe

    with PPOTrainer(config, rows, observers=[watch], print_steps=False) as trainer:
        before = {name: tensor.clone() for name, tensor in trainer.actor.named_full_tensors()}
        trainer.train(
            workflow=UPSTREAM,
            # A reward that differs within a group, so that there is a gradient.
            workflow_kwargs={"reward_fn": f"{REWARDS}:first_token", "processor": config.actor.path},
        )
        after = dict(trainer.actor.named_full_tensors())
    assert pictures == [rows[i]["images"][0] for i in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert len(differences) == 2  # the second after a weight update
    assert max(differences) < 1e-5
    moved = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    assert any("visual" in name or "vision_tower" in name for name in moved)
