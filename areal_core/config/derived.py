"""Values of options that a user does not set and that follow from others.

An option that must equal another one follows it without a word. Other choices are in one note. What
is set, in the file, by an override or by a preset, is never changed: `checks.py` refuses it if it
contradicts another option. One exception: a run that only trains samples from servers that run
already if `AREAL_LLM_SERVER_ADDRS` names some.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_core.config.allocation import Allocation, Parallel, resolve_allocation
from areal_core.config.experiment import DPOConfig, PPOConfig
from areal_core.config.generation import GenerationHyperparameters
from areal_core.config.option import Role
from areal_core.config.presets import set_option, shown
from areal_core.config.scheduling import placed_together
from areal_core.config.train_engine import PPOActorConfig
from areal_core.environment import ADDRESSES_VARIABLE
from areal_core.errors import AllocationError

Tree = dict[str, Any]
FOLLOWS = {  # option: the one that it must equal, or does if nothing else is set
    "rollout.consumer_batch_size": "train_dataset.batch_size",
    "actor.temperature": "gconfig.temperature",
    "actor.max_new_tokens": "gconfig.max_new_tokens",
    "actor.reward_norm.group_size": "gconfig.n_samples",
    "actor.adv_norm.group_size": "gconfig.n_samples",
    "ref.temperature": "actor.temperature",
    "teacher.temperature": "actor.temperature",
    **{
        f"{model}.enable_tree_training": "actor.enable_tree_training"
        for model in ("ref", "critic", "teacher")
    },
}
OPTIONAL = ("actor.reward_norm", "actor.adv_norm", "ref", "critic", "teacher")  # sections that may be missing
LENGTH_LIMITS = tuple(f"{model}.mb_spec.max_tokens_per_mb" for model in ("actor", "ref", "critic", "teacher"))
LONGEST, MINIBATCHES = GenerationHyperparameters.max_new_tokens, PPOActorConfig.ppo_n_minibatches
PLACES = ("allocation_mode", "rollout.backend", "actor.backend")
RECOVERING = ("auto", "on", "fault")
PERIODS = ("freq_epochs", "freq_steps", "freq_secs")
# Of servers that use the trainer's devices in turn; `checks.py` refuses other values.
SHARING = {
    "rollout.max_head_offpolicyness": 0,
    "actor.weight_update_mode": "disk",
    "sglang.enable_memory_saver": True,
    "enable_offload": True,
}
RECOVERY_STEPS, RECOVERY_SECONDS = 10, 600


def derive_options(tree: Tree, cls: type, file: str, role: Role = "train") -> list[str]:
    """Set options of `tree` that are missing and follow from others; return notes on choices.

    Args:
        tree: nested dicts of the options that are set.
        file: path of the config file; its name is the default of the experiment's.
        role: of the process that reads them.
    """
    follow(tree, cls)
    if role == "rollout":  # rows are the script's own matter, and the model may be named by its servers
        served = "${vllm.model}" if value_of(tree, "vllm.model") else "${sglang.model_path}"
        without = {"train_dataset.path": "", "train_dataset.type": "rl"}
        if value_of(tree, "sglang.model_path") or value_of(tree, "vllm.model"):
            without["actor.path"] = served
        for option, value in without.items():
            if not is_given(tree, option):
                set_option(tree, option, value)
    notes = sample_from_given_servers(tree) if issubclass(cls, PPOConfig) else []
    chosen = dict(choices(tree, cls, file, role))
    for option, value in chosen.items():
        set_option(tree, option, value)
    if chosen:
        listed = ", ".join(f"{option}={shown(value)}" for option, value in chosen.items())
        notes.append(f"not given, so chosen: {listed}")
    return notes


def num_given_servers() -> int:
    """Return how many inference servers `AREAL_LLM_SERVER_ADDRS` names."""
    return len([address for address in os.environ.get(ADDRESSES_VARIABLE, "").split(",") if address])


def sample_from_given_servers(tree: Tree) -> list[str]:
    """Add the servers that run already to an allocation that only trains; return a note on it."""
    count, modes = num_given_servers(), [str(value_of(tree, option) or "") for option in PLACES]
    if not count or not any(modes) or value_of(tree, "debug.replay_rollout_data"):
        return []
    try:
        allocation = resolve_allocation(*modes)
    except AllocationError:  # the checks report it
        return []
    if allocation.kind != "train_only":
        return []
    mode = f"sglang:d{count}+{allocation.trainer}"
    set_option(tree, "allocation_mode", mode)
    return [f"{ADDRESSES_VARIABLE} names {count} server{'s' * (count > 1)}, so allocation_mode={mode}"]


def follow(tree: Tree, cls: type) -> None:
    """Let each option of `FOLLOWS` that is missing refer to the one that it must equal."""
    follows: dict[str, str] = {}
    if issubclass(cls, PPOConfig):
        is_trained_first = is_given(tree, "actor.temperature") and not is_given(tree, "gconfig.temperature")
        follows = FOLLOWS | ({"gconfig.temperature": "actor.temperature"} if is_trained_first else {})
    elif issubclass(cls, DPOConfig):
        follows = {"ref.temperature": "actor.temperature"}
    for option, other in follows.items():
        section = option.rpartition(".")[0]
        is_missing = section in OPTIONAL and not isinstance(value_of(tree, section), dict)
        is_cycle = f"${{{option}}}" in str(raw_value(tree, other))
        if not (is_missing or is_cycle or is_given(tree, option)):
            set_option(tree, option, f"${{{other}}}")


def choices(tree: Tree, cls: type, file: str, role: Role) -> Iterator[tuple[str, Any]]:
    """Yield options that are not given and the values that they get."""
    if not is_given(tree, "experiment_name"):
        yield "experiment_name", Path(file).stem
    if not is_given(tree, "trial_name"):
        yield "trial_name", "trial0"
    if not any(value_of(tree, option) for option in PLACES):
        yield "allocation_mode", default_allocation(cls, role)
    if value_of(tree, "recover.mode") in RECOVERING and not any(
        value_of(tree, f"recover.{name}") for name in PERIODS
    ):
        yield "recover.freq_steps", RECOVERY_STEPS
        yield "recover.freq_secs", RECOVERY_SECONDS
    if issubclass(cls, PPOConfig):
        chosen = choices_of_ppo(tree)
        yield from (item for item in chosen if role == "train" or item[0].startswith("gconfig."))


def default_allocation(cls: type, role: Role) -> str:
    if not issubclass(cls, PPOConfig):
        return "fsdp:d1"
    servers = f"sglang:d{num_given_servers() or 1}"
    if role == "rollout":
        return servers
    return f"{servers}+fsdp:d1" if num_given_servers() else "embedded|fsdp:d1"


def choices_of_ppo(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield options of policy optimisation that are not given and the values that they get."""
    if value_of(tree, "ref") is None and not is_given(tree, "actor.kl_ctl"):
        yield "actor.kl_ctl", 0.0
    yield from lengths_that_fit(tree)
    yield from choices_on_shared_devices(tree)
    rows = rows_of_rank(tree)
    for model in ("actor", "critic"):
        option = f"{model}.ppo_n_minibatches"
        exists = model == "actor" or isinstance(value_of(tree, model), dict)
        reuses = model == "actor" and value_of(tree, "actor.prox_logp_method") == "reuse_train_logp"
        if exists and (0 < rows < MINIBATCHES or reuses) and not is_given(tree, option):
            yield option, 1 if reuses else rows


def choices_on_shared_devices(tree: Tree) -> Iterator[tuple[str, Any]]:
    try:
        shares = any(modes_of(tree)) and allocation_of(tree).shares_devices
    except AllocationError:  # the checks report it
        return
    if shares:
        yield from ((name, value) for name, value in SHARING.items() if not is_given(tree, name))


def lengths_that_fit(tree: Tree) -> Iterator[tuple[str, int]]:
    """Yield the maximum length of a completion, or with its prompt, that every limit holds."""
    of_servers = "vllm.max_model_len" if "vllm" in "".join(modes_of(tree)) else "sglang.context_length"
    options = (*LENGTH_LIMITS, "gconfig.max_tokens", of_servers)
    shortest = min((limit for option in options if (limit := number_of(tree, option, 0))), default=0)
    prompt = number_of(tree, "train_dataset.max_length", 0)
    longest = prompt + number_of(tree, "gconfig.max_new_tokens", 0)
    if not is_given(tree, "gconfig.max_new_tokens"):
        if 0 < shortest - prompt < LONGEST:
            yield "gconfig.max_new_tokens", shortest - prompt
    elif 0 < prompt <= shortest < longest and not is_given(tree, "gconfig.max_tokens"):
        yield "gconfig.max_tokens", shortest


def rows_of_rank(tree: Tree) -> int:
    """Return the sequences of a data-parallel rank in a step; 0 if the allocation has none."""
    try:
        train = allocation_of(tree).train if any(modes_of(tree)) else Parallel()
    except AllocationError:  # the checks report it
        return 0
    rows = number_of(tree, "train_dataset.batch_size", 1) * number_of(tree, "gconfig.n_samples", 1)
    return rows // train.data if train is not None else 0


def allocation_of(tree: Tree) -> Allocation:
    """Return the allocation of a run that gives one. Raises AllocationError."""
    strategies = [value_of(tree, f"{role}.scheduling_strategy") for role in ("actor", "rollout")]
    return placed_together(resolve_allocation(*modes_of(tree)), *strategies)


def modes_of(tree: Tree) -> list[str]:
    """Return the three texts that define the allocation, "" for each that is not given."""
    return [str(value_of(tree, option) or "") for option in PLACES]


def is_given(tree: Tree, option: str) -> bool:
    """Return whether an option is set, also to null, or lies in a section that is not a dict."""
    *sections, leaf = option.split(".")
    for section in sections:
        if section not in tree:
            return False
        tree = tree[section]
        if not isinstance(tree, dict):
            return True
    return leaf in tree


def raw_value(tree: Any, option: str) -> Any:
    for part in option.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def number_of(tree: Tree, option: str, default: int) -> int:
    """Return the value of an option; `default` if it is not set, or not a whole number."""
    value = value_of(tree, option)
    return value if isinstance(value, int) else default


def value_of(tree: Tree, option: str) -> Any:
    """Return the value of an option with its interpolations resolved; None if it is not set."""
    found: Any = tree
    for part in option.split("."):
        if not is_resolved_later(found):
            found = found.get(part) if isinstance(found, dict) else None
    if not is_resolved_later(found):
        return found  # most are: a config object of all options takes 20 ms
    try:
        value = OmegaConf.select(OmegaConf.create(tree), option)
    except OmegaConfBaseException:  # reported when the config is built
        return None
    return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value


def is_resolved_later(value: Any) -> bool:
    return isinstance(value, str) and ("${" in value or value == "???")
