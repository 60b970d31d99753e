"""Checks of options that must agree, made when a config is loaded.

Rules that can be written as a row are in `rules.py`, options without their feature in
`upstream.py`, models and data with images in `vision_checks.py`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from areal_core.config.derived import num_given_servers
from areal_core.config.experiment import BaseExperimentConfig, EvaluatorConfig, PPOConfig
from areal_core.config.option import ROLLOUT_SECTIONS, Role
from areal_core.config.presets import shown
from areal_core.config.rules import ALL, broken_rules, rows_per_rank
from areal_core.config.scheduling import specs_without_effect, strategies_without_effect, wrong_specs
from areal_core.config.servers import ALL_LINEAR, server_options, serves_adapters
from areal_core.config.train_engine import TrainEngineConfig
from areal_core.config.upstream import names_of_another_run, not_yet, without_effect_on_a_model
from areal_core.config.vision_checks import images_in_use
from areal_core.environment import ADDRESSES_VARIABLE
from areal_core.errors import AllocationError, ConfigError

# Adapters in a server's memory: the previous version stays until every client requests the new one.
ADAPTERS_AT_ONCE = 2


def check_config(config: BaseExperimentConfig, role: Role = "train") -> list[str]:
    """Return notes on options that have no effect.

    An allocation without a trainer is checked as role "rollout" is.

    Raises ConfigError with one line per disagreement.
    """
    values = flat_values(config)
    problems = [*wrong_values(config), *not_yet(values, refused=True), *images_in_use(config)]
    problems += wrong_specs(values)
    try:
        if role == "rollout" or config.allocation.train is None:
            return check_rollouts(config, values)
        problems += disagreements(config, role)
    except AllocationError as error:  # every other reader of the allocation would raise it
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return [
        *not_yet(values, refused=False),
        *names_of_another_run(config, values),
        *specs_without_effect(values, config.scheduler.type),
        *strategies_without_effect(values),
        *without_effect_on_a_model(config),
        *without_effect_on_a_cpu(config),
        *given_servers_without_use(config),
        *seeds_without_effect(config),
        *of_an_evaluation_alone(config),
    ]


def check_rollouts(config: BaseExperimentConfig, values: dict[str, Any]) -> list[str]:
    """Check the options of rollouts without a trainer; return notes, the first on this role.

    Raises ConfigError with one line per disagreement, the last on this role.
    """
    role = "checked for rollouts alone: options of training may be missing and are not compared"
    read = {name: value for name, value in values.items() if name.split(".")[0] in ROLLOUT_SECTIONS}
    problems = [*wrong_values(config), *not_yet(read, refused=True), *images_in_use(config)]
    if not config.actor.path:
        problems.append("actor.path is empty; give a model folder")
    problems += disagreements(config, "rollout")
    if problems:
        raise ConfigError("\n".join([*problems, f"({role})"]))
    return [role, *not_yet(read, refused=False)]


def flat_values(section: Any, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for field in dataclasses.fields(section):
        name, value = prefix + field.name, getattr(section, field.name)
        flat[name] = value
        if dataclasses.is_dataclass(value):
            flat |= flat_values(value, f"{name}.")
    return flat


def wrong_values(section: Any, prefix: str = "") -> Iterator[str]:
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


def evaluations_fit_the_method(config: BaseExperimentConfig) -> Iterator[str]:
    allocation, method = config.allocation, type(config).__name__
    if allocation.kind != "eval":
        return
    if isinstance(config, PPOConfig) and allocation.rollout is None:
        yield f"the allocation {allocation} has no rollout engine and {method} samples: use embedded|eval or sglang:d1+eval"
    if not isinstance(config, PPOConfig) and allocation.train is None:
        yield f"the allocation {allocation} evaluates samples and {method} has none: use fsdp:d1|eval, which measures its rows"


def engines_of(config: BaseExperimentConfig) -> Iterator[tuple[str, TrainEngineConfig]]:
    """Yield the name and the section of each model."""
    for name, section in vars(config).items():
        if isinstance(section, TrainEngineConfig):
            yield name, section


def without_effect_on_a_cpu(config: BaseExperimentConfig) -> Iterator[str]:
    if config.device != "cpu":
        return
    for name, engine in engines_of(config):
        options = {
            "offload": engine.offload,
            "fsdp.offload_params": engine.fsdp.offload_params,
            "fsdp.per_layer_optim_step": engine.fsdp.per_layer_optim_step,
            "optimizer.offload": engine.optimizer is not None and engine.optimizer.offload,
        }
        for option, is_on in options.items():
            if is_on:
                yield f"{name}.{option} is True and device is 'cpu': everything is in host memory already"
    if isinstance(config, PPOConfig) and config.allocation.shares_devices:
        yield f"the allocation {config.allocation} and device is 'cpu': SGLang's servers take their turns there and free no memory"


def given_servers_without_use(config: BaseExperimentConfig) -> Iterator[str]:
    if num_given_servers() and config.allocation.rollout_backend == "embedded":
        yield (
            f"{ADDRESSES_VARIABLE} is set and the allocation {config.allocation} samples in the trainer's processes: "
            f"to sample from those servers give {config.allocation.trainer!r}"
        )


def seeds_without_effect(config: BaseExperimentConfig) -> Iterator[str]:
    if not isinstance(config, PPOConfig) or not config.allocation.has_servers:
        return
    sampled, option = config.rollout, "rollout.deterministic_sampling is True"
    if sampled.deterministic_sampling and sampled.max_head_offpolicyness:
        yield (
            f"{option} and rollout.max_head_offpolicyness is {sampled.max_head_offpolicyness}: which weights sample a "
            "prompt depends on the time; set the second to 0 for equal runs"
        )
    is_deaf = (
        config.allocation.rollout_backend == "sglang" and not config.sglang.enable_deterministic_inference
    )
    if sampled.deterministic_sampling and is_deaf:
        yield f"{option}, and SGLang ignores seeds without sglang.enable_deterministic_inference: set that to true"


def of_an_evaluation_alone(config: BaseExperimentConfig) -> Iterator[str]:
    """Yield one sentence on options of an evaluation without training, in a run that trains."""
    if not config.allocation.trains:
        return
    given = [
        f"evaluator.{name} is {value!r}"
        for name in ("checkpoints", "rows", "max_rows")
        if (value := getattr(config.evaluator, name)) != getattr(EvaluatorConfig, name)
    ]
    if given:
        yield f"{', '.join(given)} and the run trains: they are of a run that only evaluates (areal-debug eval)"


def servers_take_adapters(config: PPOConfig) -> Iterator[str]:
    actor, sglang, options = config.actor, config.sglang, server_options(config, config.allocation)
    names = options.names
    if options.enable_lora and not actor.use_lora:
        yield f"{names['enable_lora']} is True and actor.use_lora is False; there is no adapter to sample with: set both to the same value"
    if not serves_adapters(config):
        return
    if not options.enable_lora:
        yield f"rollout.use_lora is True and {names['enable_lora']} is not; the servers would refuse adapters: set it to true"
    if options.max_lora_rank is None or options.max_lora_rank < actor.lora_rank:
        yield (
            f"{names['max_lora_rank']} is {options.max_lora_rank} and actor.lora_rank is {actor.lora_rank}; "
            "the first must be at least the second"
        )
    if options.max_adapters < ADAPTERS_AT_ONCE:
        yield (
            f"{names['max_adapters']} is {options.max_adapters}; a weight update needs {ADAPTERS_AT_ONCE}: "
            "the new adapter and the previous one"
        )
    served, wanted = sglang.lora_target_modules or [ALL_LINEAR], actor.target_modules or [ALL_LINEAR]
    is_open = config.allocation.rollout_backend != "sglang" or {ALL_LINEAR, "all"} & set(served)
    if not is_open and not set(wanted) <= set(served):
        yield f"sglang.lora_target_modules is {served} and actor.target_modules is {wanted}; the first must include all of the second"
    if actor.weight_update_mode != "disk":
        yield (
            f"actor.weight_update_mode is {actor.weight_update_mode!r} and servers are sent adapters, which they load only from a "
            f"folder: set it to disk, or rollout.use_lora and {names['enable_lora']} to false for merged weights"
        )


def given_servers_are_those_of_the_allocation(config: PPOConfig) -> Iterator[str]:
    count, allocation = num_given_servers(), config.allocation
    if not count or allocation.kind != "decoupled" or config.debug.replay_rollout_data:
        return
    assert allocation.rollout is not None  # a decoupled allocation has servers
    if count != allocation.rollout.data:
        yield (
            f"{ADDRESSES_VARIABLE} names {count} inference servers and the allocation {allocation} has "
            f"{allocation.rollout.data}: name as many, give {allocation.trainer!r} to use those that are named, or "
            "unset the variable to let the run start its own"
        )


def too_short(config: PPOConfig, limits: dict[str, int | None]) -> Iterator[str]:
    """Yield one sentence for each limit, by its option, below the longest possible sequence."""
    gconfig, max_length = config.gconfig, config.train_dataset.max_length
    longest = min(gconfig.max_tokens, (max_length or 0) + gconfig.max_new_tokens)
    lengths = (
        f"train_dataset.max_length is {max_length} and gconfig.max_new_tokens is {gconfig.max_new_tokens}"
    )
    for name, limit in limits.items():
        if limit is not None and limit < longest:
            yield (
                f"{name} is {limit}; {lengths}: a sequence of {longest} tokens would not fit: raise the first, "
                "or lower one of the others or gconfig.max_tokens"
            )


def servers_and_trainer_can_take_turns(config: PPOConfig) -> Iterator[str]:
    allocation, rollout, sglang = config.allocation, config.rollout, config.sglang
    if not allocation.shares_devices:
        return
    assert allocation.rollout is not None
    assert allocation.train is not None
    shared = f"the allocation {allocation} samples and trains on the same devices"
    separate = f"'{allocation.engine}+{allocation.trainer}'"
    if allocation.rollout_backend != "sglang":
        yield f"{shared}, and only SGLang servers release their memory here: use sglang, or {separate}"
    if allocation.rollout.world_size != allocation.train.world_size:
        yield (
            f"{shared}, and has {allocation.rollout.world_size} of them for servers and {allocation.train.world_size} for ranks; "
            "the numbers must be equal"
        )
    if config.scheduler.type not in (None, "local"):
        yield f"{shared}, and scheduler.type is {config.scheduler.type!r}; only the local launcher places both there: use {separate}"
    wrong = {
        "rollout.max_head_offpolicyness": (rollout.max_head_offpolicyness, 0, "nothing is sampled meanwhile"),
        "actor.weight_update_mode": (config.actor.weight_update_mode, "disk", "NCCL accepts a device once"),
        "rollout.use_lora": (rollout.use_lora, False, "released weights are loaded again in full"),
        "sglang.enable_lora": (bool(sglang.enable_lora), False, "released weights are loaded again in full"),
    }
    if config.device != "cpu":  # where SGLang has no memory saver
        wrong["sglang.enable_memory_saver"] = (sglang.enable_memory_saver, True, "servers keep their memory")
    for name in ALL:
        model = getattr(config, name)
        if model is not None and not model.fsdp.offload_params:
            wrong[f"{name}.offload"] = (model.offload, True, "the model stays on the device")
    for name, (value, needed, why) in wrong.items():
        if value != needed:
            yield f"{name} is {value!r} and {shared} in turn, where {why}: set the first to {shown(needed)}"


def minibatches_have_rows(config: PPOConfig) -> Iterator[str]:
    per_rank = rows_per_rank(config)
    for name, model in {"actor": config.actor, "critic": config.critic}.items():
        if model is not None and model.ppo_n_minibatches > max(per_rank, 1):
            yield (
                f"{name}.ppo_n_minibatches is {model.ppo_n_minibatches} and each rank has {per_rank} sequences "
                "(train_dataset.batch_size x gconfig.n_samples / ranks); expected 1 to that many"
            )


def longest_sequence_fits(config: PPOConfig, role: Role) -> Iterator[str]:
    models = {name: getattr(config, name) for name in ALL}
    limits: dict[str, int | None] = {}
    if config.allocation.has_servers:
        options = server_options(config, config.allocation)
        limits[options.names["context_length"]] = options.context_length
    if role == "train":
        limits |= {
            f"{name}.mb_spec.max_tokens_per_mb": model.mb_spec.max_tokens_per_mb
            for name, model in models.items()
            if model is not None
        }
    yield from too_short(config, limits)


def disagreements(config: BaseExperimentConfig, role: Role) -> Iterator[str]:
    """Yield one sentence for each disagreement between options. Raises AllocationError."""
    yield from broken_rules(config, role)
    yield from evaluations_fit_the_method(config)
    if isinstance(config, PPOConfig):
        yield from longest_sequence_fits(config, role)
    if isinstance(config, PPOConfig) and role == "train":
        yield from given_servers_are_those_of_the_allocation(config)
        yield from servers_and_trainer_can_take_turns(config)
        yield from minibatches_have_rows(config)
        yield from servers_take_adapters(config)
