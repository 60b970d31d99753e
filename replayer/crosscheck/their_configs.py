"""Configurations of trainers as `Options`, and as another framework reads them.

`options_of` answers what the trainer of a record was configured to do; `as_trl` and `as_verl` what
the same configuration means in those frameworks, with the values that they have in their code. What
is not known, or not computed here, is a reason why a stage is not checked.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from replayer.check import member
from replayer.crosscheck.options import CISPO, Options
from replayer.crosscheck.step_rows import Origin
from replayer.own_code import FIRST_STAGE

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TRL_AGGREGATIONS: dict[str, str] = TABLES["values"]["aggregations"]
NOTHING: Mapping[str, Any] = {}
NOT_COMPUTED = "the configuration has {}, which is not recomputed here"
MEAN_OF_UPDATES = "the loss is a mean over {} optimizer steps, of which only the first is known"


@dataclass(frozen=True)
class Configured:
    """The options of a record's trainer; `unchecked` has the reason by stage.

    `source` begins the half sentence about an expected value: "the config says". `trainer` is None
    for our own. `counts` are its options that count micro-batches, ranks and rows of a group.
    """

    options: Options
    source: str
    trainer: str | None = None
    unchecked: dict[str, str] = field(default_factory=dict)
    dtype: str | None = None
    has_critic: bool = False
    temperature: float = 1.0
    counts: Mapping[str, int] = field(default_factory=dict)


def options_of(origin: Origin) -> Configured:
    """Read the configuration of a record.

    Raises ValueError for a trainer whose configuration is not known here.
    """
    readers: dict[str | None, Callable[[Mapping[str, Any]], Configured]] = {
        None: of_ours,
        "trl": of_trl,
        "verl": of_verl,
        "slime": of_slime,
        "miles": of_slime,
        "nemo-rl": partial(configured, "nemo-rl"),
    }
    if not origin.config:
        raise ValueError(
            "the record does not say with which options its trainer ran: record with config=, "
            "or import with --config"
        )
    if origin.trainer not in readers:
        raise ValueError(
            f"the configuration of the trainer {origin.trainer} is not read here: only those of trl, "
            "verl, slime, miles, nemo-rl and our own trainer are"
        )
    try:
        return readers[origin.trainer](origin.config)
    except (KeyError, TypeError, AttributeError) as error:
        lacks = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"the recorded configuration is not one of {origin.trainer or 'our trainer'}: {lacks}"
        ) from None


WITHOUT = {"max_norm": inf, "max_length": 1, "context_parallel": 1}  # what 0 and null mean


def plain(trainer: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the table of a trainer reads from its configuration."""
    table = TABLES[trainer]
    found = table["fixed"] | {option: member(config, *row) for option, row in table["options"].items()}
    for option, (path, usual, *values) in table["choices"].items():
        chosen = values[not member(config, path, usual)]
        found[option] = member(config, *chosen) if isinstance(chosen, list) else chosen
    for option, (path, usual, name) in table["maps"].items():
        values = TABLES["values"][name]
        found[option] = values.get(str(member(config, path, usual)), values.get("else"))
    found |= {option: found[option] or least for option, least in WITHOUT.items() if option in found}
    return with_none(found)


def with_none(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with None for "none", which TOML has no value for."""
    return {option: None if value == "none" else value for option, value in options.items()}


def not_computed(trainer: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return why stages are not checked, of members with another value than the usual one."""
    found = {}
    for stage, path, *usual in TABLES[trainer]["unchecked"]:
        if (value := member(config, path)) not in (*usual, None):
            found[stage] = NOT_COMPUTED.format(f"{path}={value}")
    return found


def of_ours(config: Mapping[str, Any]) -> Configured:
    actor = config["actor"]
    if "gconfig" not in config:
        raise ValueError("the record is of supervised training, without rewards and advantages to recompute")
    unchecked = not_computed("ours", config)
    for name, stage in FIRST_STAGE.items():
        if actor.get(name):
            unchecked |= dict.fromkeys(
                ("advantages", "loss")[stage == "loss" :], NOT_COMPUTED.format(f"actor.{name}={actor[name]}")
            )
    decoupled = actor["use_decoupled_loss"]
    if decoupled and (method := actor["prox_logp_method"]) in ("loglinear", "reuse_train_logp"):
        unchecked["loss"] = NOT_COMPUTED.format(f"prox_logp_method={method}")
    if actor.get("gae_timestep_unit") == "turn" or config.get("gconfig", {}).get("reward_normalization"):
        unchecked |= dict.fromkeys(("advantages", "loss"), NOT_COMPUTED.format("GAE or rewards by turn"))
    if actor["mask_no_eos_with_zero"] and config.get("critic"):
        unchecked["advantages"] = NOT_COMPUTED.format("mask_no_eos_with_zero and a critic")
    overlong = actor["max_new_tokens"], actor["overlong_tokens"], actor["overlong_penalty_factor"]
    rewards, tokens = norm(actor["reward_norm"]), norm(actor["adv_norm"])
    options = Options(
        **{option: actor[name] for option, name in TABLES["ours"]["actor"].items()},
        overlong=overlong if actor["overlong_reward_penalty"] else None,
        truncated="zero" if actor["mask_no_eos_with_zero"] else "kept",
        **rewards,
        **{f"token_{name}": value for name, value in tokens.items()},
        old_logprobs="trainer" if decoupled or actor["recompute_logprob"] else "rollout",
        correction="masked tokens" if decoupled else None,
        clipped=CISPO if actor.get("use_cispo_loss") else Options.clipped,
        max_norm=actor["optimizer"]["gradient_clipping"] or inf,
    )
    return Configured(
        options, "the config says", None, unchecked, actor["dtype"], bool(config.get("critic")),
        float(actor.get("temperature", 1.0)),
    )  # fmt: skip


def norm(section: Mapping[str, Any] | None) -> dict[str, Any]:
    """Read a normalisation of our configuration."""
    if section is None:
        return {"mean": None, "std": None}
    return {option: section[name] for option, name in TABLES["normalisation"].items()}


def of_trl(config: Mapping[str, Any]) -> Configured:
    """Read TRL's GRPOConfig, SFTConfig or DPOConfig; a member that is absent has TRL's default."""
    given = config.get
    kind = given("loss_type", "dapo")
    if kind == "nll" or isinstance(kind, list):
        return configured("trl-dpo" if isinstance(kind, list) else "trl-sft", config)
    corrects = bool(given("use_vllm", False) and given("vllm_importance_sampling_correction", True))
    accumulated = given("gradient_accumulation_steps", 1)
    generate_every = (given("steps_per_generation") or accumulated) * given("num_iterations", 1)
    updates = generate_every // accumulated
    late = f"the loss is that of the last of {updates} optimizer steps, others came before"
    mode = given("vllm_importance_sampling_mode", "sequence_mask")
    found = configured(
        "trl",
        config,
        {"loss": late} if updates > 1 else {},
        old_logprobs="trainer" if corrects or accumulated % generate_every else "current",
        correction=TABLES["values"]["corrections"][mode] if corrects else None,
    )
    if kind == "cispo":  # epsilon_high is the largest ratio itself, and no ratio is too small
        most = (found.options.clip_high or found.options.clip_low) - 1
        found = replace(found, options=replace(found.options, clip_low=inf, clip_high=most))
    return found


def of_verl(config: Mapping[str, Any]) -> Configured:
    """Read verl's resolved configuration as plain JSON; an absent member has verl's default."""
    actor, algorithm = config["actor_rollout_ref"]["actor"], config["algorithm"]
    estimator = str(algorithm.get("adv_estimator", "gae"))
    prompts = member(config, "data.train_batch_size") or 0
    updates = prompts // (actor.get("ppo_mini_batch_size") or prompts or 1) * actor.get("ppo_epochs", 1)
    options = plain("verl", config) | {
        "discount": algorithm.get("gamma", 1.0) if estimator == "gae" else 1.0,
        "gae_lambda": algorithm.get("lam", 1.0) if estimator == "gae" else 1.0,
        "clip_low": actor.get("clip_ratio_low") or actor.get("clip_ratio", 0.2),
        "clip_high": actor.get("clip_ratio_high") or actor.get("clip_ratio", 0.2),
        "max_length": actor.get("loss_scale_factor") or member(config, "data.max_response_length", 1),
    }
    if options["ratio_level"] == "sequence":
        options["dual_clip"] = None
    if estimator == "grpo" and not algorithm.get("norm_adv_by_std_in_grpo", True):
        options["std"] = None
    unchecked = {"loss": MEAN_OF_UPDATES.format(updates)} if updates > 1 else {}
    found = configured(
        "verl", config, unchecked, replace(VERL_ESTIMATORS.get(estimator, Options()), **options)
    )
    counts = {**found.counts, "the number of micro-batches": found.options.micro_batches}
    return replace(found, has_critic=estimator == "gae", counts=counts)


def configured(
    name: str,
    config: Mapping[str, Any],
    unchecked: Mapping[str, str] = NOTHING,
    options: Options | None = None,
    **more: Any,
) -> Configured:
    """Read the table of a trainer: its options unless they are given, counts, sizes, what is not recomputed.

    Counts are whole numbers above 1, by the last part of their names.
    """
    table = TABLES[name]
    config = {**config, **{section: config[section] for section in table.get("needs", ())}}
    options = options or Options(**plain(name, config), **more)
    known = {path.rpartition(".")[2]: member(config, path) for path in table["counts"]}
    counts = {name: value for name, value in known.items() if isinstance(value, int) and value > 1}
    found = not_computed(name, config) | dict(unchecked)
    if "sizes" in table:
        prompts, samples, batch, micro = (member(config, path) for path in table["sizes"])
        rows = (prompts or 0) * (samples or 1)
        options = replace(options, micro_batches=max(1, rows // (micro or rows or 1)))
        if (updates := rows // (batch or rows or 1)) > 1:
            found["loss"] = MEAN_OF_UPDATES.format(updates)
    flags = [member(config, path) for path in table.get("precision", ())]  # bf16, which is usual, and fp16
    dtype = "float32" if flags and flags[0] is False and not flags[1] else None
    temperature = float(member(config, *table["temperature"]) or 1.0)
    return Configured(
        options, table["source"], name.removesuffix("-sft").removesuffix("-dpo"), found, dtype,
        temperature=temperature, counts=counts,
    )  # fmt: skip


def of_slime(config: Mapping[str, Any]) -> Configured:
    """Read the arguments of slime or miles as plain JSON; an absent one has slime's default."""
    given = config.get
    is_plus_plus = given("advantage_estimator") == "reinforce_plus_plus"
    is_normalised = given("rewards_normalization", True) and not is_plus_plus
    return configured(
        "slime",
        config,
        mean="group" if is_normalised else None,
        std="group" if is_normalised and given("grpo_std_normalization", True) else None,
        kl_reward_coef=given("kl_coef", 0.0) if is_plus_plus else 0.0,
        discount=given("gamma", 1.0) if is_plus_plus else 1.0,
        teacher_coef=float(given("opd_kl_coef") or 1.0) if given("use_opd", False) else 0.0,
        **WHITENED if given("normalize_advantages", False) else {},
    )


WHITENED: dict[str, Any] = TABLES["whitened"]
VERL_ESTIMATORS = {
    name: Options(**with_none(row), **WHITENED if name in TABLES["verl"]["whitened"] else {})
    for name, row in TABLES["verl"]["estimators"].items()
}


def taken(options: Options, *names: str) -> dict[str, Any]:
    """Return some options by name."""
    return {name: getattr(options, name) for name in names}


def as_trl(options: Options) -> Options:
    """Return what TRL computes where it is given these options as far as it has them."""
    return replace(
        options,
        **taken(Options(), *TABLES["trl"]["lacks"]),
        mask=options.mask if options.mask == "without truncated rows" else "loss mask",
        eps=1e-4,
        aggregation="token-mean" if options.aggregation == "token-sum" else options.aggregation,
        empty_rows="counted",
        kl_weight="ratio",
    )


def as_verl(options: Options) -> Options:
    """Return what verl computes where it is given these options as far as it has them."""
    if options.mean is None:
        base = replace(VERL_ESTIMATORS["gae"], **taken(options, "discount", "gae_lambda"))
    elif options.leave_one_out:
        base = VERL_ESTIMATORS["rloo"]
    elif options.std is None and options.token_std is not None:
        base = VERL_ESTIMATORS["reinforce_plus_plus_baseline"]
    else:
        base = replace(VERL_ESTIMATORS["grpo"], std=None if options.std is None else "group")
    is_token = options.ratio_level == "token"
    return replace(
        base,
        **taken(options, *TABLES["verl"]["takes"]),
        kl_place="rewards",
        ratio_level="token" if is_token else "sequence",
        dual_clip=options.dual_clip or 3.0 if is_token else None,
    )
