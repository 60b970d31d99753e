"""Checks of options that must agree, made when a config is loaded.

Each coupling is one function that yields one sentence per disagreement, with both names and values.
Those of policy optimisation are in `policy_checks.py`, options without their feature in
`not_yet.py`, models and data with images in `vision.py`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from areal_core.config.derived import num_given_servers
from areal_core.config.experiment import (
    BaseExperimentConfig,
    DPOConfig,
    EvaluatorConfig,
    PPOConfig,
    RWConfig,
)
from areal_core.config.not_yet import (
    names_of_another_run,
    not_yet,
    without_effect_on_a_model,
)
from areal_core.config.policy_checks import PPO_COUPLINGS, ROLLOUT_COUPLINGS
from areal_core.config.roles import ROLLOUT_SECTIONS, Role
from areal_core.config.scheduling import specs_without_effect, strategies_without_effect, wrong_specs
from areal_core.config.servers import server_options
from areal_core.config.train_engine import TrainEngineConfig
from areal_core.config.vision import images_in_use
from areal_core.environment import ADDRESSES_VARIABLE
from areal_core.errors import AllocationError, ConfigError

ALL_LINEAR = "all-linear"  # upstream's name of every linear layer
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
        problems += disagreements(config)
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
        *of_an_evaluation_alone(config),
    ]


def check_rollouts(config: BaseExperimentConfig, values: dict[str, Any]) -> list[str]:
    """Check the options of rollouts without a trainer; return notes, the first on this role.

    Raises ConfigError with one line per disagreement, the last on this role.
    """
    role = "checked for rollouts alone: options of training may be missing and are not compared"
    read = {name: value for name, value in values.items() if name.split(".")[0] in ROLLOUT_SECTIONS}
    problems = [*wrong_values(config), *not_yet(read, refused=True), *images_in_use(config)]
    if isinstance(config, PPOConfig):
        problems += [problem for coupling in ROLLOUT_COUPLINGS for problem in coupling(config)]
    if not config.actor.path:
        problems.append("actor.path is empty; give a model folder")
    problems += evaluations_fit_the_method(config)
    if problems:
        raise ConfigError("\n".join([*problems, f"({role})"]))
    return [role, *not_yet(read, refused=False)]


def disagreements(config: BaseExperimentConfig) -> Iterator[str]:
    """Yield one sentence for each disagreement between options. Raises AllocationError."""
    for common in COUPLINGS:
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


def model_can_be_trained(config: BaseExperimentConfig) -> Iterator[str]:
    if not config.actor.path:
        yield "actor.path is empty; give a model folder"
    if config.actor.optimizer is None:
        yield "actor.optimizer is empty; give at least actor.optimizer.lr"


def evaluations_fit_the_method(config: BaseExperimentConfig) -> Iterator[str]:
    allocation, method = config.allocation, type(config).__name__
    if allocation.kind != "eval":
        return
    if isinstance(config, PPOConfig) and allocation.rollout is None:
        yield f"the allocation {allocation} has no rollout engine and {method} samples: use embedded|eval or sglang:d1+eval"
    if not isinstance(config, PPOConfig) and allocation.train is None:
        yield f"the allocation {allocation} evaluates samples and {method} has none: use fsdp:d1|eval, which measures its rows"


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


def only_critics_and_reward_models_have_scores(config: BaseExperimentConfig) -> Iterator[str]:
    may_have = (
        ("actor.is_critic",)
        if isinstance(config, RWConfig)
        else ("critic.is_critic", "reward_model.is_critic")
    )
    for name, value in flat_values(config).items():
        if name.endswith(".is_critic") and value and name not in may_have:
            yield f"{name} is True and the section configures a language model: set it to false"


def only_pairs_stay_together(config: BaseExperimentConfig) -> Iterator[str]:
    has_pairs = isinstance(config, DPOConfig | RWConfig)
    for name, value in flat_values(config).items():
        if name.endswith(".granularity") and value not in ((1, 2) if has_pairs else (1,)):
            yield f"{name} is {value}; DPO and reward models keep 2 sequences together, others 1: use 1 for both"


def engines_of(config: BaseExperimentConfig) -> Iterator[tuple[str, TrainEngineConfig]]:
    """Yield the name and the section of each model."""
    for name, section in vars(config).items():
        if isinstance(section, TrainEngineConfig):
            yield name, section


def liger_has_a_gpu(config: BaseExperimentConfig) -> Iterator[str]:
    for name, engine in engines_of(config):
        if engine.use_liger and config.device == "cpu":
            yield f"{name}.use_liger is True and device is 'cpu'; Liger's kernels need a GPU: set it to false"


def copies_of_the_weights_divide_the_ranks(config: BaseExperimentConfig) -> Iterator[str]:
    train = config.allocation.train
    for name, engine in engines_of(config):
        size = engine.fsdp.shard_size
        if size is not None and train is not None and (train.data * train.context % size or train.tensor > 1):
            yield (
                f"{name}.fsdp.shard_size is {size} and the allocation trains with {train}; "
                "the first must divide d x c, and needs t1"
            )


def trained_models_need_no_loss_scaling(config: BaseExperimentConfig) -> Iterator[str]:
    for name, engine in engines_of(config):
        if name in ("actor", "critic") and engine.dtype == "float16":
            yield (
                f"{name}.dtype is 'float16', in which gradients of long batches become 0, and losses are not scaled: "
                "use bfloat16 or float32"
            )


def compiled_layers_are_not_split(config: BaseExperimentConfig) -> Iterator[str]:
    train = config.allocation.train
    for name, engine in engines_of(config):
        if engine.fsdp.compile and train is not None and train.tensor > 1:
            yield (
                f"{name}.fsdp.compile is True and the allocation trains on t{train.tensor}; "
                "tensor-parallel layers are not compiled: set the first to false, or use t1"
            )


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


def other_model(config: BaseExperimentConfig, name: str) -> TrainEngineConfig | None:
    """Return a section of a model other than the actor; None if it is missing or empty."""
    has_it = isinstance(config, PPOConfig) or (isinstance(config, DPOConfig) and name == "ref")
    return getattr(config, name) if has_it else None


def adapters_have_a_size(config: BaseExperimentConfig) -> Iterator[str]:
    for name, model in {"actor": config.actor, "critic": other_model(config, "critic")}.items():
        if model is None or not model.use_lora:
            continue
        if model.lora_rank < 1 or model.lora_alpha <= 0:
            yield f"{name}.lora_rank is {model.lora_rank} and {name}.lora_alpha is {model.lora_alpha}; expected 1 or more, and above 0"
        train = config.allocation.train
        if train is not None and train.tensor > 1:
            yield (
                f"{name}.use_lora is True and the allocation trains with {train}; adapters are not sharded over "
                "tensor-parallel ranks: use t1"
            )


def only_trained_models_have_adapters(config: BaseExperimentConfig) -> Iterator[str]:
    for name in ("ref", "teacher", "reward_model"):
        model = other_model(config, name)
        if model is not None and model.use_lora:
            yield f"{name}.use_lora is True and {name} is not trained; set it to false"


def serves_adapters(config: PPOConfig) -> bool:
    """Return whether weight updates send servers the adapter alone, not the merged weights."""
    requested = config.rollout.use_lora or server_options(config, config.allocation).enable_lora
    return config.actor.use_lora and requested and config.allocation.has_servers


def is_base_of(reference: TrainEngineConfig | None, actor: TrainEngineConfig) -> bool:
    """Return whether a reference (None: the initial actor) is the actor without its adapter.

    It is equal bit for bit then, and needs no second model.
    """
    names = (
        "path", "dtype", "temperature", "mb_spec", "attn_impl", "use_liger", "init_from_scratch", "enable_tree_training",
    )  # fmt: skip
    return actor.use_lora and (
        reference is None or all(getattr(reference, name) == getattr(actor, name) for name in names)
    )


def adapters_are_trained_where_requested(config: PPOConfig) -> Iterator[str]:
    options = server_options(config, config.allocation)
    for name, requested in {
        "rollout.use_lora": config.rollout.use_lora,
        options.names["enable_lora"]: options.enable_lora,
    }.items():
        if requested and not config.actor.use_lora:
            yield f"{name} is True and actor.use_lora is False; there is no adapter to sample with: set both to the same value"


def servers_take_adapters(config: PPOConfig) -> Iterator[str]:
    if not serves_adapters(config):
        return
    actor, sglang, options = config.actor, config.sglang, server_options(config, config.allocation)
    names = options.names
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
    if (
        config.allocation.rollout_backend == "sglang"
        and not {ALL_LINEAR, "all"} & set(served)
        and not set(wanted) <= set(served)
    ):
        yield f"sglang.lora_target_modules is {served} and actor.target_modules is {wanted}; the first must include all of the second"
    if actor.weight_update_mode != "disk":
        yield (
            f"actor.weight_update_mode is {actor.weight_update_mode!r} and servers are sent adapters, which they load only from a "
            f"folder: set it to disk, or rollout.use_lora and {names['enable_lora']} to false for merged weights"
        )
    if config.rollout.pause_mode != "abort":
        yield (
            f"rollout.pause_mode is {config.rollout.pause_mode!r} and servers are sent adapters; a request continues with the "
            "adapter that it started with, and only an aborted one uses the new adapter: set it to abort"
        )
    if not config.gconfig.lora_name:
        yield "gconfig.lora_name is empty; give the adapter a name"


def pair_fits_into_a_micro_batch(config: DPOConfig | RWConfig) -> Iterator[str]:
    limit, longest = config.actor.mb_spec.max_tokens_per_mb, config.train_dataset.max_length
    if limit and longest and limit < 2 * longest:
        yield (
            f"actor.mb_spec.max_tokens_per_mb is {limit} and train_dataset.max_length is {longest}; "
            "a pair stays in one micro-batch: the first must be at least twice the second"
        )


def dpo_compares_with_its_reference(config: DPOConfig) -> Iterator[str]:
    actor, ref = config.actor, config.ref
    if ref is not None and not ref.path:
        yield "ref.path is empty; give a model folder, or no ref section for the initial policy"
    if ref is not None and ref.temperature != actor.temperature:
        yield f"ref.temperature is {ref.temperature} and actor.temperature is {actor.temperature}; they must be equal"
    if actor.init_from_scratch:
        yield "actor.init_from_scratch is True; the reference could not have the same weights: give a trained model"


COUPLINGS = (
    model_can_be_trained,
    evaluations_fit_the_method,
    recovery_writes_checkpoints,
    debug_either_records_or_replays,
    recorded_steps_are_given_once,
    batch_divides_over_ranks,
    only_critics_and_reward_models_have_scores,
    only_pairs_stay_together,
    liger_has_a_gpu,
    trained_models_need_no_loss_scaling,
    copies_of_the_weights_divide_the_ranks,
    compiled_layers_are_not_split,
    adapters_have_a_size,
    only_trained_models_have_adapters,
)
SERVED_LORA_COUPLINGS = (adapters_are_trained_where_requested, servers_take_adapters)
PAIR_COUPLINGS = (pair_fits_into_a_micro_batch,)
DPO_COUPLINGS = (dpo_compares_with_its_reference,)
