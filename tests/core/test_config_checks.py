"""Options that must agree, that nothing reads, and that follow from others: one sentence each."""

import ast
import json
from copy import deepcopy
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from areal_core.config import GRPOConfig, PPOConfig, check_config, train_engine
from areal_core.config.checks import flat_values
from areal_core.config.loading import config_from_dict, load_with_notes
from areal_core.config.names import sections_of
from areal_core.errors import ConfigError

TABLE = yaml.load(Path(__file__).with_name("config_sentences.yaml").read_text(), yaml.CSafeLoader)
SOUND = config_from_dict(TABLE["sound"], PPOConfig)


def config_with(options: dict[str, object]) -> PPOConfig:
    config = deepcopy(SOUND)
    for name, value in options.items():
        section, (*sections, leaf) = config, name.split(".")
        for part in sections:
            section = getattr(section, part)
        kind = get_type_hints(type(section))[leaf]
        cls = next((each for each in (kind, *get_args(kind)) if is_dataclass(each)), None)
        setattr(section, leaf, value if cls is None or value is None else config_from_dict(value, cls))
    return config


def rows(part: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", TABLE[part], ids=lambda row: ", ".join(row["set"]))


def test_sound_config_passes_without_notes():
    assert check_config(config_with({})) == []


@rows("refused")
def test_disagreement_is_named_with_both_values(row):
    with pytest.raises(ConfigError) as error:
        check_config(config_with(row["set"]))
    assert str(error.value) == row["says"]


@rows("noted")
def test_an_option_without_effect_has_one_note(row):
    assert check_config(config_with(row["set"])) == [row["says"]]


@pytest.mark.parametrize("options", TABLE["agrees"])
def test_options_that_agree_pass(options):
    check_config(config_with(options))


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


FIVE_LINES = Path(__file__).with_name("five_lines.yaml").read_text()


@pytest.fixture
def load(tmp_path):
    file = tmp_path / "sums.yaml"

    def call(text, *overrides, cls=GRPOConfig):
        file.write_text(text)
        config, _, notes = load_with_notes(["--config", str(file), *overrides], cls)
        return config, notes

    return call


def test_a_file_of_five_lines_is_complete(load):
    config, notes = load(FIVE_LINES)
    assert (config.experiment_name, config.trial_name) == ("sums", "trial0")
    assert str(config.allocation) == "embedded|fsdp:d1"
    assert config.rollout.consumer_batch_size == 8
    assert config.actor.temperature == 0.8
    assert config.actor.reward_norm.group_size == 4
    assert config.actor.max_new_tokens == 64
    assert config.actor.kl_ctl == 0.0
    assert notes[1:] == [
        "not given, so chosen: experiment_name=sums, trial_name=trial0, allocation_mode=embedded|fsdp:d1"
    ]


@pytest.mark.parametrize(
    ("limits", "max_tokens"),
    [
        ("sglang.context_length=80 allocation_mode=sglang:d1+fsdp:d1", 80),
        ("actor.mb_spec.max_tokens_per_mb=90", 90),
        ("actor.mb_spec.max_tokens_per_mb=90 ref.path=m ref.mb_spec.max_tokens_per_mb=70", 70),
        ("actor.mb_spec.max_tokens_per_mb=96", 32768),
        ("actor.mb_spec.max_tokens_per_mb=90 gconfig.max_tokens=80", 80),
    ],
)
def test_prompt_and_completion_together_fit_where_each_alone_does(load, limits, max_tokens):
    config, notes = load(FIVE_LINES, "train_dataset.max_length=32", *limits.split())
    assert config.gconfig.max_tokens == max_tokens
    assert (f"gconfig.max_tokens={max_tokens}" in notes[-1]) == (
        max_tokens in (90, 70) or "80 alloc" in limits
    )


@pytest.mark.parametrize("family", ["llava", "smolvlm"])
def test_vision_models_of_other_families_are_refused(family, load, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vision_config": {}}))
    with pytest.raises(ConfigError) as error:
        load(FIVE_LINES, f"actor.path={tmp_path}")
    assert str(error.value) == (
        f"actor.path is {str(tmp_path)!r}, a vision model of type {family!r}, which is not supported: "
        "train one of qwen2_vl, qwen2_5_vl, qwen3_vl, gemma3, or a text model"
    )


@pytest.mark.parametrize("given", ["", "allocation_mode=fsdp:d1", "actor.backend=fsdp:d1"])
def test_a_run_without_servers_of_its_own_samples_from_those_that_run_already(given, load, monkeypatch):
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "a:1,b:2")
    config, notes = load(FIVE_LINES, *filter(None, [given]))
    assert str(config.allocation) == "sglang:d2+fsdp:d1"
    said = "AREAL_LLM_SERVER_ADDRS names 2 servers, so allocation_mode=sglang:d2+fsdp:d1"
    assert (said in notes) == bool(given)
