"""Algorithms by name: each preset expands to plain options, and to nothing else.

Precedence follows from where a preset is given. In a file, the other options of the file override
`algorithm: dapo`. On the command line, `algorithm=dapo` overrides the file, and the other overrides
override it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from areal_core.errors import ConfigError

Options = dict[str, Any]  # dotted name -> value


def reward_norm(mean_level: str, std_level: str | None) -> Options:
    """Return options that normalise rewards by the mean and standard deviation of these levels."""
    return {
        "actor.reward_norm.mean_level": mean_level,
        "actor.reward_norm.std_level": std_level,
        "actor.reward_norm.group_size": "${gconfig.n_samples}",
    }


def like_actor(section: str) -> Options:
    return {
        f"{section}.dtype": "${actor.dtype}",
        f"{section}.mb_spec.max_tokens_per_mb": "${actor.mb_spec.max_tokens_per_mb}",
    }


def optimizer_of_actor(section: str) -> Options:
    names: tuple[str, ...] = ("type", "lr", "weight_decay", "beta1", "beta2", "eps", "min_lr_ratio")
    names += ("lr_scheduler_type", "warmup_steps_proportion", "gradient_clipping")
    return {f"{section}.optimizer.{name}": f"${{actor.optimizer.{name}}}" for name in names}


def kl_penalty(weight: float, estimator: str) -> Options:
    """Return options of a KL penalty against the initial weights, if there is no `ref` section."""
    return {
        "actor.kl_ctl": weight,
        "actor.kl_estimator": estimator,
        "ref.path": "${actor.path}",
        "ref.temperature": "${actor.temperature}",
    } | like_actor("ref")


def kl_loss(coefficient: float) -> Options:
    return kl_penalty(0.0, "k1") | {"actor.kl_loss_coef": coefficient, "actor.kl_loss_estimator": "k3"}


ADVANTAGES_OF_BATCH: Options = {
    "actor.adv_norm.mean_level": "batch",
    "actor.adv_norm.std_level": "batch",
}
NO_KL: Options = {"actor.kl_ctl": 0.0}
GRPO = reward_norm("group", "group") | ADVANTAGES_OF_BATCH | NO_KL
# As the papers define them: `adv_norm`, which upstream's files have for every algorithm, is off.
GRPO_PAPER = reward_norm("group", "group") | {
    "actor.adv_norm": None,
    "actor.loss_aggregation": "seq-mean-token-mean",
}

PRESETS: dict[str, Options] = {
    "grpo": GRPO,
    "ppo": {"actor.reward_norm": None}
    | ADVANTAGES_OF_BATCH
    | NO_KL
    | {
        "actor.gae_lambda": 1.0,
        "critic.path": "${actor.path}",
        "critic.ppo_n_minibatches": "${actor.ppo_n_minibatches}",
        "critic.eps_clip": 0.5,
    }
    | like_actor("critic")
    | optimizer_of_actor("critic"),
    "dr_grpo": reward_norm("group", None) | ADVANTAGES_OF_BATCH | NO_KL,
    "rloo": reward_norm("group", None)
    | {"actor.reward_norm.mean_leave1out": True}
    | ADVANTAGES_OF_BATCH
    | NO_KL,
    "grpo_paper": GRPO_PAPER | kl_loss(0.04),
    "dr_grpo_paper": reward_norm("group", None)
    | NO_KL
    | {
        "actor.adv_norm": None,
        "actor.loss_aggregation": "seq-mean-token-sum-norm",
        "actor.max_new_tokens": "${gconfig.max_new_tokens}",
    },
    "rloo_paper": reward_norm("group", None)
    | NO_KL
    | {
        "actor.reward_norm.mean_leave1out": True,
        "actor.adv_norm": None,
        "actor.loss_aggregation": "seq-mean-token-sum",
    },
    "gspo_paper": GRPO_PAPER
    | NO_KL
    | {
        "actor.importance_sampling_level": "sequence",
        "actor.eps_clip": 3e-4,
        "actor.eps_clip_higher": 4e-4,
    },
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
    "distill": GRPO
    | {
        "teacher.rl_loss_weight": 1.0,
        "teacher.distill_loss_weight": 0.005,
        "teacher.temperature": "${actor.temperature}",
    }
    | like_actor("teacher"),
}

# Options that define one algorithm, reset so that none is left over from another one in the file.
RESET: Options = {
    "actor.reward_norm.mean_leave1out": False,
    "actor.adv_norm.mean_leave1out": False,
    "actor.importance_sampling_level": "token",
    "actor.loss_aggregation": "token-mean",
    "actor.kl_loss_coef": 0.0,
    "actor.eps_clip_higher": None,
    "actor.dynamic_sampling": False,
    "actor.overlong_reward_penalty": False,
    "actor.use_sapo_loss": False,
    "actor.m2_threshold": None,
    "critic": None,
    "teacher": None,
}
# Sections that a preset adds only where the file has none.
MODELS = ("ref", "critic", "teacher")


def split_algorithm(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (names given by `algorithm=name`, "" for `~algorithm`; the other overrides)."""
    chosen = [override for override in overrides if option_name(override) == "algorithm"]
    return [override.partition("=")[2] for override in chosen], [o for o in overrides if o not in chosen]


def option_name(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def expand_preset(tree: dict[str, Any], name: str, given: Sequence[str]) -> str:
    """Set the options of a preset in `tree`, except those in `given`; return a sentence on both.

    Raises ConfigError for an unknown name.
    """
    if name not in PRESETS:
        raise ConfigError(f"algorithm is {name!r}; expected one of {', '.join(PRESETS)}")
    present, models = dict(leaves(tree)), {model for model in MODELS if isinstance(tree.get(model), dict)}
    brought = {option.partition(".")[0] for option in PRESETS[name]}
    left_over = {o: v for o, v in RESET.items() if o not in brought and (o in present or o in models)}
    wanted = left_over | {o: v for o, v in PRESETS[name].items() if o.partition(".")[0] not in models}
    kept = [option for option in wanted if any(same_place(option, other) for other in given)]
    changed = {option: value for option, value in wanted.items() if option not in kept}
    for option, value in changed.items():
        set_option(tree, option, value)
    settings = [
        f"{option}={shown(value)}"
        for option, value in changed.items()
        if not unchanged(option, value, present)
    ]
    sentence = f"algorithm={name} sets {', '.join(settings) or 'nothing that differs from the file'}"
    return sentence + (
        f"; your own {', '.join(kept)} {'stays' if len(kept) == 1 else 'stay'}" if kept else ""
    )


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and value of every leaf of nested dicts."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def same_place(option: str, other: str) -> bool:
    """Return whether one option is the other, or a section that contains it."""
    return f"{option}.".startswith(f"{other}.") or f"{other}.".startswith(f"{option}.")


def set_option(tree: dict[str, Any], option: str, value: Any) -> None:
    *sections, leaf = option.split(".")
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    tree[leaf] = value


def unchanged(option: str, value: Any, present: Options) -> bool:
    """Return whether `present` already has this value."""
    return option in present and present[option] == value


def shown(value: Any) -> str:
    """Return the value as YAML spells it."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
