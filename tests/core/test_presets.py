"""A preset sets its options and no others, and its advantages are those of its paper in numpy."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from areal_core.config import GRPOConfig, NormConfig, PPOActorConfig, load_expr_config
from areal_core.config.checks import flat_values
from areal_core.config.presets import PRESETS, RESET, shown
from areal_core.telemetry.stats import Stats
from areal_core.trainer.objective import PolicyObjective

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/gsm8k_grpo.yaml"


def load(*overrides, file=EXAMPLE):
    return load_expr_config(["--config", str(file), *overrides], GRPOConfig)[0]


def test_presets_follow_other_options():
    assert load("algorithm=rloo").actor.reward_norm == NormConfig(
        "group", mean_leave1out=True, std_level=None, group_size=4
    )
    assert load("algorithm=reinforce_pp").ref.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert load("algorithm=dr_grpo_paper", "gconfig.max_new_tokens=77").actor.max_new_tokens == 77
    ppo = load("algorithm=ppo")
    assert (ppo.actor.reward_norm, ppo.critic.path, ppo.critic.eps_clip) == (None, ppo.actor.path, 0.5)
    assert ppo.critic.optimizer == ppo.actor.optimizer
    assert load("algorithm=ppo", "critic.optimizer.lr=1e-6").critic.optimizer == replace(
        ppo.actor.optimizer, lr=1e-6
    )
    distilled = load("algorithm=distill", "teacher.path=large", "teacher.rl_loss_weight=0")
    assert (distilled.teacher.path, distilled.teacher.rl_loss_weight) == ("large", 0.0)


def test_nothing_is_left_over_from_the_algorithm_that_a_file_was_written_for(tmp_path, caplog):
    file = tmp_path / "own.yaml"
    sapo = "actor:\n  use_sapo_loss: true\n  m2_threshold: null\n"
    text = EXAMPLE.read_text().replace("use_decoupled_loss: true", "use_decoupled_loss: false")
    file.write_text(text.replace("actor:\n", sapo))
    assert load(file=file).actor.use_sapo_loss
    assert load("algorithm=gspo", file=file).actor.use_sapo_loss is False
    assert "actor.use_sapo_loss=false" in caplog.text
    actor = PPOActorConfig(reward_norm=NormConfig(), adv_norm=NormConfig())
    defaults = flat_values(GRPOConfig(actor=actor))
    assert {option: defaults[option] for option in RESET} == RESET


def test_the_document_has_the_table_of_the_presets():
    document = (ROOT / "docs/algorithms.md").read_text()
    for name, options in PRESETS.items():
        listed = ", ".join(f"`{option}={shown(value)}`" for option, value in options.items())
        assert f"| `{name}` | {listed} |" in document, f"| `{name}` | {listed} |"


CASE = Path(__file__).parents[2] / "examples/gsm8k_grpo.yaml"
EPS = 1e-5
WIDTH = 24


def group_mean(r, groups):
    return np.array([r[groups == group].mean() for group in groups])


def others_mean(r, groups):
    """Mean of the other samples of the prompt; of the sample itself if it is the only one."""
    means = []
    for i, group in enumerate(groups):
        others = np.delete(r, i)[np.delete(groups, i) == group]
        means.append(others.mean() if len(others) else r[i])
    return np.array(means)


def grpo(r, groups):
    std = np.array([r[groups == group].std(ddof=1) if (groups == group).sum() > 1 else 0 for group in groups])
    return np.where(std > 0, (r - group_mean(r, groups)) / (std + EPS), 0.0)


REWARDS = {
    "dr_grpo": lambda r, groups: r - group_mean(r, groups),
    "dr_grpo_paper": lambda r, groups: r - group_mean(r, groups),
    "rloo_paper": lambda r, groups: r - others_mean(r, groups),
    "rloo": lambda r, groups: r - others_mean(r, groups),
    "reinforce_pp": lambda r, groups: r,
    "reinforce_pp_baseline": lambda r, groups: r - group_mean(r, groups),
    "lite_ppo": lambda r, groups: (r - group_mean(r, groups)) / (r.std(ddof=1) + EPS),
}
PENALTIES = {"reinforce_pp": lambda d: 0.001 * d, "reinforce_pp_baseline": lambda d: 0.001 * d**2 / 2}
WITH_OTHER_MODELS = {"ppo", "distill"}


def sampled(seed):
    """Seven prompts of up to four samples, rows interleaved.

    One group has one sample, and one row no token in the loss mask.
    """
    random = np.random.default_rng(seed)
    groups = random.permutation(np.repeat([3, 8, 1, 90, 7, 5, 2], [4, 4, 3, 4, 2, 1, 4]))
    lengths = random.integers(4, WIDTH + 1, len(groups))
    attention = np.arange(WIDTH) < lengths[:, None]
    mask = attention & (random.random((len(groups), WIDTH)) < 0.7)
    mask[:, 0] = False
    mask[np.flatnonzero(groups == 8)[0]] = False
    rewards = random.integers(0, 2, len(groups)) + 0.25 * random.integers(0, 3, len(groups))
    logprobs, reference = -random.random((2, len(groups), WIDTH))
    return groups, attention, mask, rewards, logprobs, reference


def as_batch(groups, attention, mask, rewards, logprobs):
    return {
        "input_ids": torch.ones(mask.shape, dtype=torch.int32),
        "attention_mask": torch.from_numpy(attention),
        "loss_mask": torch.from_numpy(mask).int(),
        "logprobs": torch.from_numpy(logprobs * mask).float(),
        "versions": torch.where(torch.from_numpy(mask), 0, -1).int(),
        "rewards": torch.from_numpy(rewards).float(),
        "prompt_id": torch.from_numpy(groups),
        "sample_id": torch.arange(len(groups), dtype=torch.int32),
        "finish_reason": torch.zeros(len(groups), dtype=torch.int32),
    }


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in WITH_OTHER_MODELS])
def test_advantages_of_a_preset(name):
    overrides = ["gconfig.max_new_tokens=16", "train_dataset.max_length=8"]
    overrides += ["actor.overlong_tokens=6", "actor.overlong_penalty_factor=0.5"] * (name == "dapo")
    options = load_expr_config(["--config", str(CASE), f"algorithm={name}", *overrides], GRPOConfig)[0].actor  # fmt: skip
    groups, attention, mask, rewards, logprobs, reference = sampled(len(name))

    r = rewards.copy()
    if name == "dapo":
        r -= 0.5 * np.clip((mask.sum(1) - 10) / 6, 0, None)
    r = np.clip((r + options.reward_bias) * options.reward_scaling, -20, 20)
    r = REWARDS.get(name, grpo)(r, groups)
    aligned, kl = np.roll(mask, -1, axis=1), np.zeros(mask.shape)
    if name in PENALTIES:
        difference = np.roll(logprobs, -1, axis=1) - reference
        kl = np.where(aligned, PENALTIES[name](difference), 0.0)
    to_come = kl[:, ::-1].cumsum(1)[
        :, ::-1
    ]  # without a discount, the penalty of later tokens counts for a token, too
    tokens = np.where(aligned, r[:, None] - to_come, 0.0)
    chosen = tokens[aligned]
    expected = np.where(aligned, (tokens - chosen.mean()) / (chosen.std(ddof=1) + EPS), 0.0)
    if name.endswith("_paper"):
        expected = tokens

    ours = torch.from_numpy(reference).float()
    scorer = SimpleNamespace(
        score=lambda batch: (batch["logprobs"], batch["logprobs"]), compute_logprobs=lambda batch: ours
    )
    objective = PolicyObjective(options, lambda sums: sums, Stats())
    batch = as_batch(groups, attention, mask, rewards, logprobs)
    got = objective.learning_inputs(batch, scorer, scorer if name in PENALTIES else None, 0)
    np.testing.assert_allclose(got["advantages"].numpy(), expected, rtol=1e-4, atol=2e-5)
