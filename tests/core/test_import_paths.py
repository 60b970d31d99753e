"""Import paths of AReaL, in strings and in scripts."""

import importlib
from functools import partial

import pytest

from areal_core.agent.errors import NotAnAgent
from areal_core.config.import_paths import OURS, import_object, ours, replacements
from areal_core.errors import ConfigError, RewardError
from areal_core.reward.functions import gsm8k_reward_fn, load_reward_fn
from areal_core.rollout.workflow import RLVRWorkflow
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


def test_each_place_that_imports_by_name_translates():
    assert find_workflow("areal.workflow.rlvr.RLVRWorkflow") is RLVRWorkflow
    assert find_workflow("areal.workflow.rlvr:RLVRWorkflow") is RLVRWorkflow
    assert import_object("areal.workflow.openai.math_agent.MathAgent", "agent").__name__ == "MathAgent"
    assert load_reward_fn("areal.reward.gsm8k.gsm8k_reward_fn") is gsm8k_reward_fn
    assert load_reward_fn("areal.reward.gsm8k:gsm8k_reward_fn") is gsm8k_reward_fn


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


def test_the_imports_of_a_script_are_listed_with_what_to_write():
    script = (
        "import torch, areal\nfrom areal import PPOTrainer\n"
        "from areal.api.cli_args import GRPOConfig, load_expr_config\nfrom areal.utils.saver import Saver\n"
        "from .areal import mine\nfrom arealistic import other\n"
    )
    assert list(replacements(script)) == [
        "line 1: areal: no equivalent (docs/coming_from_areal.md lists what there is)",
        "line 2: areal.PPOTrainer: from areal_core.trainer.rl import PPOTrainer",
        "line 3: areal.api.cli_args.GRPOConfig: from areal_core.config import GRPOConfig",
        "line 3: areal.api.cli_args.load_expr_config: from areal_core.config import load_expr_config",
        "line 4: areal.utils.saver.Saver: no equivalent (docs/coming_from_areal.md lists what there is)",
    ]
    assert list(replacements("def broken(:")) == []
