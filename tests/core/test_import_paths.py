"""Import paths of AReaL, in strings and in scripts."""

import importlib
from functools import partial

import pytest

from areal_core.agent.errors import NotAnAgent
from areal_core.config.import_paths import OURS, import_object, ours
from areal_core.errors import ConfigError, RewardError
from areal_core.reward.functions import load_reward_fn
from areal_core.trainer.build_rollouts import find_workflow

import_agent = partial(import_object, what="agent", raised=NotAnAgent)


@pytest.mark.parametrize("path", OURS.values())
def test_what_a_name_is_called_here_exists(path):
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("areal.workflow.rlvr.RLVRWorkflow", "areal_core.rollout.workflow.RLVRWorkflow"),
        ("areal.workflow.RLVRWorkflow", "areal_core.rollout.workflow.RLVRWorkflow"),
        ("areal.workflow.rlvr:RLVRWorkflow", "areal_core.rollout.workflow:RLVRWorkflow"),
        ("areal.workflow.multi_turn.MultiTurnWorkflow", "areal_core.agent.multi_turn.MultiTurnWorkflow"),
        ("areal.reward.gsm8k_reward_fn", "areal_core.reward.functions.gsm8k_reward_fn"),
        ("areal.PPOTrainer", "areal_core.trainer.rl.PPOTrainer"),
        ("areal.trainer.PPOTrainer", "areal_core.trainer.rl.PPOTrainer"),
        ("areal.api.RolloutWorkflow", "areal_core.rollout.workflow.RolloutWorkflow"),
        ("areal.workflow.rlvr.MyRLVRWorkflow", "areal.workflow.rlvr.MyRLVRWorkflow"),
        ("my.workflow.RLVRWorkflow", "my.workflow.RLVRWorkflow"),
        ("file.py:RLVRWorkflow", "file.py:RLVRWorkflow"),
    ],
)
def test_a_path_of_areal_is_translated_and_no_other(path, expected):
    assert ours(path) == expected


@pytest.mark.parametrize(
    ("load", "path", "error", "nearest"),
    [
        (find_workflow, "areal.workflow.langchain.math_agent.MathAgent", ConfigError, "MathAgent, for areal.workflow.openai"),
        (import_agent, "areal.workflow.openai_agent.math_agent:MathAgent", NotAnAgent, "MathAgent, for areal.workflow.openai"),
        (load_reward_fn, "areal.reward.math_parser.process_results", RewardError, "functions.gsm8k_reward_fn, for areal.reward.gsm8k"),
        (find_workflow, "realhf.impl.environment.Env", ConfigError, r"Env has no equivalent here \(docs/coming_from_areal.md"),
    ],
)  # fmt: skip
def test_an_unknown_path_is_refused_with_the_nearest(load, path, error, nearest):
    with pytest.raises(error, match=f"AReaL's .*{nearest}"):
        load(path)
