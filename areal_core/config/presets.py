"""Algorithms by name: each stands for some plain options, and for nothing else.

A preset acts where it is written. `algorithm: dapo` in a file gives way to the options that this file sets; `algorithm=dapo` on
the command line goes before the file, and gives way to the other overrides.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from areal_core.errors import ConfigError

Options = dict[str, Any]  # dotted name -> value


def reward_norm(mean_level: str, std_level: str | None) -> Options:
    """Rewards minus the mean of their level, over the standard deviation of theirs."""
    return {
        "actor.reward_norm.mean_level": mean_level,
        "actor.reward_norm.std_level": std_level,
        "actor.reward_norm.group_size": "${gconfig.n_samples}",
    }


def kl_penalty(weight: float, estimator: str) -> Options:
    """A KL penalty against the weights that the run begins with, if there is no `ref` section."""
    return {
        "actor.kl_ctl": weight,
        "actor.kl_estimator": estimator,
        "ref.path": "${actor.path}",
        "ref.dtype": "${actor.dtype}",
        "ref.temperature": "${actor.temperature}",
        "ref.mb_spec.max_tokens_per_mb": "${actor.mb_spec.max_tokens_per_mb}",
    }


ADVANTAGES_OF_BATCH: Options = {
    "actor.adv_norm.mean_level": "batch",
    "actor.adv_norm.std_level": "batch",
}
NO_KL: Options = {"actor.kl_ctl": 0.0}
GRPO = reward_norm("group", "group") | ADVANTAGES_OF_BATCH | NO_KL

PRESETS: dict[str, Options] = {
    "grpo": GRPO,
    "dr_grpo": reward_norm("group", None) | ADVANTAGES_OF_BATCH | NO_KL,
    "rloo": reward_norm("group", None)
    | {"actor.reward_norm.mean_leave1out": True}
    | ADVANTAGES_OF_BATCH
    | NO_KL,
    "reinforce_pp": {"actor.reward_norm": None} | ADVANTAGES_OF_BATCH | kl_penalty(0.001, "k1"),
    "reinforce_pp_baseline": reward_norm("group", None) | ADVANTAGES_OF_BATCH | kl_penalty(0.001, "k2"),
    "lite_ppo": reward_norm("group", "batch") | ADVANTAGES_OF_BATCH | NO_KL,
    "gspo": GRPO | {"actor.importance_sampling_level": "sequence"},
    "dapo": GRPO
    | {
        "actor.eps_clip": 0.2,
        "actor.eps_clip_higher": 0.28,
        "actor.dynamic_sampling": True,
        "actor.overlong_reward_penalty": True,
        "actor.overlong_tokens": 512,
        "actor.overlong_penalty_factor": 1.0,
        "actor.max_new_tokens": "${gconfig.max_new_tokens}",
    },
    "sapo": GRPO
    | {
        "actor.use_sapo_loss": True,
        "actor.sapo_tau_pos": 1.0,
        "actor.sapo_tau_neg": 1.05,
        "actor.c_clip": None,
        "actor.use_decoupled_loss": False,
        "actor.recompute_logprob": False,
        "actor.prox_logp_method": "recompute",
    },
    "m2po": GRPO
    | {
        "actor.m2_threshold": 0.04,
        "actor.use_decoupled_loss": True,
        "actor.prox_logp_method": "recompute",
    },
    "decoupled_ppo": GRPO
    | {
        "actor.use_decoupled_loss": True,
        "actor.prox_logp_method": "recompute",
        "actor.behav_imp_weight_cap": None,
        "actor.rejection_sampling.level": "token",
        "actor.rejection_sampling.action": "mask",
        "actor.rejection_sampling.metric": "ratio",
        "actor.rejection_sampling.upper": 5.0,
        "actor.rejection_sampling.lower": None,
    },
}

# What makes one algorithm and must not be left over from another that a file was written for.
PUT_BACK: Options = {
    "actor.reward_norm.mean_leave1out": False,
    "actor.adv_norm.mean_leave1out": False,
    "actor.importance_sampling_level": "token",
    "actor.eps_clip_higher": None,
    "actor.dynamic_sampling": False,
    "actor.overlong_reward_penalty": False,
    "actor.use_sapo_loss": False,
    "actor.m2_threshold": None,
}
NOT_AVAILABLE = {
    "ppo": "a preset for PPO with a critic is not built: use decoupled_ppo or reinforce_pp, which need no value model",
    "distill": "distillation has no preset",
}


def split_algorithm(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(names given by `algorithm=name`, "" for `~algorithm`; the other overrides)."""
    chosen = [override for override in overrides if named(override) == "algorithm"]
    return [override.partition("=")[2] for override in chosen], [o for o in overrides if o not in chosen]


def named(override: str) -> str:
    """The option of an override."""
    return override.lstrip("+~").partition("=")[0]


def expand_preset(tree: dict[str, Any], name: str, given: Sequence[str]) -> str:
    """Put the options of a preset into `tree`, except where one in `given` speaks of the same; say so in a sentence.

    Raises ConfigError for a name that is unknown or not available.
    """
    if name in NOT_AVAILABLE:
        raise ConfigError(f"algorithm is {name!r}, which is not available: {NOT_AVAILABLE[name]}")
    if name not in PRESETS:
        raise ConfigError(f"algorithm is {name!r}; expected one of {', '.join(PRESETS)}")
    present = dict(leaves(tree))
    wanted = {option: value for option, value in PUT_BACK.items() if option in present} | PRESETS[name]
    if isinstance(tree.get("ref"), dict):
        wanted = {option: value for option, value in wanted.items() if not option.startswith("ref.")}
    kept = [option for option in wanted if any(same_place(option, other) for other in given)]
    changed = {option: value for option, value in wanted.items() if option not in kept}
    for option, value in changed.items():
        set_option(tree, option, value)
    told = [
        f"{option}={shown(value)}"
        for option, value in changed.items()
        if not unchanged(option, value, present)
    ]
    sentence = f"algorithm={name} sets {', '.join(told) or 'nothing that was not so already'}"
    return sentence + (
        f"; your own {', '.join(kept)} {'stays' if len(kept) == 1 else 'stay'}" if kept else ""
    )


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything in nested dicts that is no dict."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def same_place(option: str, other: str) -> bool:
    """Whether one is the other, or a section that holds it."""
    return f"{option}.".startswith(f"{other}.") or f"{other}.".startswith(f"{option}.")


def set_option(tree: dict[str, Any], option: str, value: Any) -> None:
    *sections, leaf = option.split(".")
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    tree[leaf] = value


def unchanged(option: str, value: Any, present: Options) -> bool:
    return option in present and present[option] == value


def shown(value: Any) -> str:
    """As in YAML."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
