"""Each option is read by the code, or has a note or a refusal when it is set."""

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from areal_core.config import GRPOConfig, check_config, train_engine
from areal_core.config.checks import flat_values
from areal_core.config.names import sections_of
from areal_core.errors import ConfigError

ROOT = Path(__file__).parents[2]
CODE = ("areal_core", "areal_debug", "consistency", "replayer")
# Files that compare or list options without using them.
NOT_USES = ("checks.py", "rules.py", "derived.py", "upstream.py", "vision_checks.py")


@cache
def names_in_code() -> frozenset[str]:
    """Return all names of attributes and of fields that are read through `fields(section)`."""
    found = set()
    for package in CODE:
        for file in (ROOT / package).rglob("*.py"):
            if not (file.parent.name == "config" and file.name in NOT_USES):
                nodes = ast.walk(ast.parse(file.read_text()))
                found |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return frozenset(found)


def options_of(cls: type, prefix: str = "") -> dict[str, type]:
    """Return the class of the section of every option, by the option's dotted name."""
    found: dict[str, type] = {}
    for name, section in sections_of(cls).items():
        found |= {prefix + name: cls} if section is None else options_of(section, f"{prefix}{name}.")
    return found


def complete_config() -> GRPOConfig:
    """Return a consistent config in which every optional section is present."""
    config = GRPOConfig(experiment_name="a", trial_name="b", allocation_mode="sglang:d1+fsdp:d2")
    fill(config)
    for model in (config.actor, config.ref, config.critic, config.teacher, config.reward_model):
        model.path, model.optimizer = "model", train_engine.OptimizerConfig()
    for policy in (config.actor, config.ref):
        policy.rejection_sampling = policy.reward_norm = policy.adv_norm = None
    config.actor.ppo_n_minibatches = config.critic.ppo_n_minibatches = 1
    for data in (config.train_dataset, config.valid_dataset):
        data.path, data.type, data.batch_size = "data", "rl", 8
    config.rollout.consumer_batch_size = 8
    return config


def fill(section: Any) -> None:
    for name, nested in sections_of(type(section)).items():
        if nested is not None:
            if getattr(section, name) is None:
                setattr(section, name, nested())
            fill(getattr(section, name))


def another_value(option: str, old: Any, choices: tuple[Any, ...]) -> Any:
    if choices:
        return next(choice for choice in choices if choice != old)
    if isinstance(old, bool):
        return not old
    if isinstance(old, int | float):
        return old + 1
    if option.endswith("queue_size"):
        return 1000
    has_parts = isinstance(old, dict) or "scheduling" in option
    return {"cpu": 1} if has_parts else ["a"] if isinstance(old, list) else "another"


def sentences(option: str, choices: tuple[Any, ...]) -> str:
    """Return the notes, or the refusal, of a complete config with another value of an option."""
    config = complete_config()
    *parents, leaf = option.split(".")
    section: Any = config
    for parent in parents:
        section = getattr(section, parent)
    setattr(section, leaf, another_value(option, getattr(section, leaf), choices))
    try:
        return "\n".join(check_config(config))
    except ConfigError as error:
        return str(error)


# Sections whose fields become flags of a server, and options of samples.
BY_FIELDS = ("sglang.", "vllm.", "gconfig.", "eval_gconfig.")
# Options whose only meaning is what the checks compare them with.
ASSERTIONS = (
    "async_training",
    "actor.reward_norm.group_size",
    "actor.adv_norm.group_size",
    "actor.group_size",
    "critic.is_critic",  # a critic and a reward model have a head with and without it
    "reward_model.is_critic",
)
# Sections of which any use is noted, whatever is in them.
NOTED_SECTIONS = ("ref.reward_norm", "ref.adv_norm", "ref.rejection_sampling")


def unread_options() -> list[tuple[str, tuple[Any, ...]]]:
    found = []
    for option, section in options_of(GRPOConfig).items():
        name = option.rpartition(".")[2]
        if name in names_in_code() or name.startswith("_") or option.startswith(BY_FIELDS):
            continue
        choices = section.__dataclass_fields__[name].metadata["choices"]
        if len(choices) != 1 and option not in ASSERTIONS:
            found.append((option, choices))
    return found


def test_a_complete_config_has_no_notes():
    assert check_config(complete_config()) == []


def test_an_option_that_nothing_reads_is_noted_or_refused():
    unread = unread_options()
    assert {option for option, _ in unread} <= set(flat_values(complete_config()))
    assert "actor.optimizer.hysteresis" in dict(unread)
    assert [option for option, choices in unread if option not in sentences(option, choices)] == []


@pytest.mark.parametrize("section", NOTED_SECTIONS)
def test_a_section_without_effect_is_noted(section):
    config = complete_config()
    name = section.removeprefix("ref.")
    setattr(config.ref, name, sections_of(train_engine.PPOActorConfig)[name]())
    assert check_config(config) == [f"{section} has no effect: a reference only computes logprobs"]
