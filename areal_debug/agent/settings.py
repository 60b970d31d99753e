"""The options of an agent under test: from a run's config or defaults, with overrides."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_core.config import (
    AgentConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    PPOConfig,
    config_from_dict,
    load_expr_config,
)
from areal_core.config.loading import apply_override


@dataclass
class AgentSections:
    """The config sections that an agent needs, used where there is no run config."""

    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)


@dataclass(frozen=True)
class Settings:
    """Sampling options, agent options, and the model of the run config, if there is one."""

    gconfig: GenerationHyperparameters
    agent: AgentConfig
    model: str | None = None


def read_settings(config_file: str | None, overrides: Sequence[str]) -> Settings:
    """Read a config file, or the defaults, and apply the overrides. Raises ConfigError."""
    if config_file is not None:
        run, _ = load_expr_config(["--config", config_file, *overrides], PPOConfig, role="rollout")
        return Settings(run.gconfig, run.rollout.agent, run.actor.path)
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override, AgentSections)
    config = config_from_dict(tree, AgentSections, source="overrides")
    return Settings(config.gconfig, config.rollout.agent)


def parse_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse `name=value` into keyword arguments: JSON values are decoded, others stay text.

    Raises:
        ValueError: an argument is not of the form NAME=VALUE.
    """
    parsed: dict[str, Any] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--arg is {argument!r}; expected NAME=VALUE")
        try:
            parsed[name] = json.loads(value)
        except ValueError:
            parsed[name] = value
    return parsed
