"""The options of a replay: those of the recorded run, with what was asked for, and without what would leave traces. Imports no torch."""

import copy
from collections.abc import Sequence
from typing import TypeVar

from areal_core.config import PPOConfig, config_from_dict
from areal_core.config.checks import check_config
from areal_core.config.loading import apply_override
from recorder import Record

C = TypeVar("C", bound=PPOConfig)


def replay_config(record: Record, model: str | None = None, settings: Sequence[str] = ()) -> PPOConfig:
    """The options of the recorded run, changed so that the replay writes nothing where that run wrote.

    Args:
        model: where the model that the run started from lies now, if it has moved.
        settings: options to set differently, as `a.b=c`.

    Raises:
        ConfigError: an option is unknown, or options do not agree any more.
    """
    tree = copy.deepcopy(record.header.config)
    for setting in settings:
        apply_override(tree, setting, PPOConfig)
    config = config_from_dict(tree, PPOConfig, source=f"the config of {record.path}")
    if settings:
        check_config(config)
    if model is not None:
        # A run regularises towards the model that it starts from, and values begin as that model with another head.
        for section in (config.ref, config.critic):
            if section is not None and section.path == config.actor.path:
                section.path = model
        config.actor.path = model
        config.tokenizer_path = config.tokenizer_path and model
    return without_side_effects(config)


def without_side_effects(config: C) -> C:
    """The config with logs of its own, no checkpoints, and nothing that is sent elsewhere."""
    config.trial_name += "-replay"
    config.saver.freq_epochs = config.saver.freq_steps = config.saver.freq_secs = None
    config.recover.mode = "disabled"
    config.perf_tracer = None
    config.stats_logger.tensorboard.path = None
    for service in (config.stats_logger.wandb, config.stats_logger.swanlab, config.stats_logger.trackio):
        service.mode = "disabled"
    return config
