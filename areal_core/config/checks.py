"""Checks of options that must agree, made when a config is loaded.

Each coupling is one function that yields one sentence per disagreement, with both names and values.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from areal_core.config.engine_checks import ENGINE_COUPLINGS, without_effect_on_a_cpu
from areal_core.config.experiment import BaseExperimentConfig, DPOConfig, PPOConfig, RWConfig
from areal_core.config.lora_checks import LORA_COUPLINGS, SERVED_LORA_COUPLINGS
from areal_core.config.not_yet import not_yet
from areal_core.config.pair_checks import DPO_COUPLINGS, PAIR_COUPLINGS
from areal_core.config.policy_checks import PPO_COUPLINGS
from areal_core.errors import AllocationError, ConfigError


def check_config(config: BaseExperimentConfig) -> list[str]:
    """Return notes on options that have no effect.

    Raises ConfigError with one line per disagreement.
    """
    values = flat_values(config)
    problems = [*wrong_values(config), *not_yet(values, refused=True)]
    try:
        problems += list(disagreements(config))
    except AllocationError as error:  # every other reader of the allocation would raise it
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return [*not_yet(values, refused=False), *without_effect_on_a_cpu(config)]


def disagreements(config: BaseExperimentConfig) -> Iterator[str]:
    """Yield one sentence for each disagreement between options. Raises AllocationError."""
    for common in COUPLINGS + LORA_COUPLINGS:
        yield from common(config)
    if isinstance(config, PPOConfig):
        for of_ppo in PPO_COUPLINGS + SERVED_LORA_COUPLINGS:
            yield from of_ppo(config)
    if isinstance(config, DPOConfig | RWConfig):
        for of_pairs in PAIR_COUPLINGS:
            yield from of_pairs(config)
    if isinstance(config, DPOConfig):
        for of_dpo in DPO_COUPLINGS:
            yield from of_dpo(config)


def flat_values(section: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> value of every option below `section`, sections included."""
    flat = {}
    for field in dataclasses.fields(section):
        name, value = prefix + field.name, getattr(section, field.name)
        flat[name] = value
        if dataclasses.is_dataclass(value):
            flat |= flat_values(value, f"{name}.")
    return flat


def wrong_values(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield one sentence for each value outside of its option's choices or limits."""
    for field in dataclasses.fields(section):
        name, value = prefix + field.name, getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from wrong_values(value, f"{name}.")
        elif field.metadata:  # a user's own subclass has plain fields
            choices, limits = field.metadata["choices"], field.metadata["limits"]
            if choices and value not in choices:
                yield f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}"
            elif limits is not None and value is not None and not limits.hold(value):
                yield f"{name} is {value}; expected {limits.words}"


def model_can_be_trained(config: BaseExperimentConfig) -> Iterator[str]:
    if not config.actor.path:
        yield "actor.path is empty; give a model folder"
    if config.actor.optimizer is None:
        yield "actor.optimizer is empty; give at least actor.optimizer.lr"


def recovery_writes_checkpoints(config: BaseExperimentConfig) -> Iterator[str]:
    recover = config.recover
    periods = (recover.freq_epochs, recover.freq_steps, recover.freq_secs)
    if recover.mode in ("auto", "on", "fault") and not any(periods):
        yield (
            f"recover.mode is {recover.mode!r} and recover.freq_epochs, freq_steps and freq_secs are {periods}; "
            "give one of them, or there is no checkpoint to continue from"
        )


def debug_either_records_or_replays(config: BaseExperimentConfig) -> Iterator[str]:
    if config.debug.dump_rollout_data and config.debug.replay_rollout_data:
        yield "debug.dump_rollout_data is True and debug.replay_rollout_data is True; a run records or replays, not both"
    if config.debug.replay_rollout_data and not config.debug.path:
        yield "debug.replay_rollout_data is True and debug.path is ''; give the folder of the record"


def recorded_steps_are_given_once(config: BaseExperimentConfig) -> Iterator[str]:
    debug = config.debug
    if debug.dump_steps is not None and debug.dump_every != 1:
        yield f"debug.dump_steps is {debug.dump_steps} and debug.dump_every is {debug.dump_every}; give one of them"


def batch_divides_over_ranks(config: BaseExperimentConfig) -> Iterator[str]:
    allocation = config.allocation
    if allocation.train is None:
        return
    batch_size, num_ranks = config.train_dataset.batch_size, allocation.train.data
    if batch_size % num_ranks:
        yield (
            f"train_dataset.batch_size is {batch_size} and the allocation trains on d{num_ranks}; "
            "the first must be a multiple of the second"
        )
    if allocation.kind == "colocated" and allocation.rollout_backend == "sglang":
        yield "the allocation puts sglang and fsdp on the same devices; use 'embedded|fsdp:dN' or 'sglang:dN+fsdp:dM'"


def only_critics_and_reward_models_have_scores(config: BaseExperimentConfig) -> Iterator[str]:
    may_have = "actor.is_critic" if isinstance(config, RWConfig) else "critic.is_critic"
    for name, value in flat_values(config).items():
        if name.endswith(".is_critic") and value and name != may_have:
            yield f"{name} is True and the section configures a language model: set it to false"


def only_pairs_stay_together(config: BaseExperimentConfig) -> Iterator[str]:
    has_pairs = isinstance(config, DPOConfig | RWConfig)
    for name, value in flat_values(config).items():
        if name.endswith(".granularity") and value not in ((1, 2) if has_pairs else (1,)):
            yield f"{name} is {value}; DPO and reward models keep 2 sequences together, others 1: use 1 for both"


COUPLINGS = (
    model_can_be_trained,
    recovery_writes_checkpoints,
    debug_either_records_or_replays,
    recorded_steps_are_given_once,
    batch_divides_over_ranks,
    only_critics_and_reward_models_have_scores,
    only_pairs_stay_together,
    *ENGINE_COUPLINGS,
)
