"""SAPO, M2PO and approximated proximal logprobs in the complete trainer.

The result is the same for any micro-batch size.
"""

from pathlib import Path

import pytest
import torch

from areal_core.config import PPOConfig, load_expr_config
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import recorder_of
from recorder import Recording, RecordingOptions, open_record
from replayer.preflight.real_steps import RandomRollouts

TINY = Path(__file__).parents[1] / "debug" / "tiny.yaml"
NUM_STEPS = 3
FULL = RecordingOptions(Recording("full"))


class OldRollouts(RandomRollouts):
    """Tokens sampled by version 0, with the approximate probability of a random model, 1/100."""

    def next_batch(self, step, version):
        batch = super().next_batch(step, 0)
        trained = batch["loss_mask"].bool()
        batch["logprobs"] = torch.where(trained, -4.6 + batch["logprobs"] / 20, 0.0)
        return batch


def train(folder, model, max_tokens_per_mb, *overrides):
    """Return (weights, statistics of the last step, record) after a few steps."""
    options = [f"cluster.fileroot={folder}", f"actor.path={model}", f"total_train_steps={NUM_STEPS}"]
    options += [
        f"actor.mb_spec.max_tokens_per_mb={max_tokens_per_mb}",
        "actor.optimizer.type=sgd",
        *overrides,
    ]
    config, _ = load_expr_config(["--config", str(TINY), *options], PPOConfig)
    record = folder / "record"
    with PPOTrainer(
        config,
        source=lambda trainer: OldRollouts(100, 4, 4, longest=16, seed=1),
        observers=[lambda trainer: recorder_of(trainer, record, FULL)],
        total_steps=NUM_STEPS,
        print_steps=False,
    ) as trainer:
        trainer.train()
        weights = torch.cat([tensor.flatten() for _, tensor in trainer.actor.named_full_tensors()])
        return weights, trainer.last_stats, open_record(record)


@pytest.mark.parametrize(
    ("algorithm", "overrides", "logged"),
    [
        pytest.param("sapo", [], "sapo_soft_gate/avg", marks=pytest.mark.long),
        ("m2po", ["actor.m2_threshold=0.01"], "m2_filtered_fraction"),
        pytest.param(
            "decoupled_ppo",
            ["actor.prox_logp_method=loglinear"],
            "behave_imp_weight/avg",
            marks=pytest.mark.long,
        ),
        pytest.param("grpo_paper", ["ref.dtype=float32"], "kl_loss/avg", marks=pytest.mark.long),
    ],
)
def test_weights_do_not_depend_on_micro_batches(algorithm, overrides, logged, tmp_path, tiny_model):
    overrides, logged = [f"algorithm={algorithm}", *overrides], f"ppo_actor/update/{logged}"
    undivided, stats, _ = train(tmp_path / "undivided", tiny_model, 4096, *overrides)
    cut, stats_of_cut, record = train(tmp_path / "cut", tiny_model, 32, *overrides)
    number = "ppo_actor/update/num_micro_batches"
    assert stats[number] < stats_of_cut[number]
    assert stats[logged] == pytest.approx(stats_of_cut[logged], rel=1e-5)
    assert stats["ppo_actor/update/update_successful"] == 1.0
    torch.testing.assert_close(undivided, cut, rtol=1e-5, atol=1e-6)
    last = record.step(NUM_STEPS - 1)
    learned = last.learning(0)
    if algorithm == "m2po":
        dropped = 1 - learned["trusted_mask"].sum() / last.batch(0, ["loss_mask"])["loss_mask"].sum()
        assert 0.1 < dropped < 0.9
        assert stats[logged] == pytest.approx(dropped)
    if algorithm == "decoupled_ppo":  # tokens of the first weights are two versions old in the last step
        assert set(learned["proximal_share"].tolist()) == {0.0, 0.5}
