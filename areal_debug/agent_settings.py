"""The options of an agent under test: those of a run's config, or defaults, with overrides."""

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
class WithoutRun:
    """The sections that an agent needs, where no run is described."""

    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)


@dataclass(frozen=True)
class Settings:
    """How to sample, how to run the agent, and the run's model, if there is a run."""

    gconfig: GenerationHyperparameters
    agent: AgentConfig
    model: str | None = None


def read_settings(config_file: str | None, overrides: Sequence[str]) -> Settings:
    """The options of a config file, or defaults; then the overrides. Raises ConfigError."""
    if config_file is not None:
        run, _ = load_expr_config(["--config", config_file, *overrides], PPOConfig)
        return Settings(run.gconfig, run.rollout.agent, run.actor.path)
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override, WithoutRun)
    config = config_from_dict(tree, WithoutRun, source="overrides")
    return Settings(config.gconfig, config.rollout.agent)


def parse_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """`name=value` as keyword arguments; a value that is JSON is what it says, any other a text. Raises ValueError."""
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
