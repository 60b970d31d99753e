"""Configurations of trainers as `Options`, and as another framework reads them.

`options_of` answers what the trainer of a record was configured to do; `as_trl` and `as_verl` what
the same configuration means in those frameworks, with the values that they have in their code. What
is not known, or not computed here, is a reason why a stage is not checked.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from replayer.check import member
from replayer.crosscheck.options import CISPO, Options
from replayer.crosscheck.step_rows import Origin
from replayer.own_code import FIRST_STAGE

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
for name, table in TABLES.items():  # one that is like another one has what that has, and its own
    TABLES[name] = TABLES[table["like"]] | table if "like" in table else table
NOTHING: Mapping[str, Any] = {}
NOT_COMPUTED = "the configuration has {}, which is not recomputed here"


@dataclass(frozen=True)
class Configured:
    """The options of a record's trainer; `unchecked` has the reason by stage.

    `source` begins the half sentence about an expected value: "the config says". `trainer` is None
    for our own. `counts` are its options that count micro-batches, ranks and rows of a group.
    `either` has values of options that it may as well have.
    """

    options: Options
    source: str
    trainer: str | None = None
    unchecked: dict[str, str] = field(default_factory=dict)
    dtype: str | None = None
    has_critic: bool = False
    temperature: float = 1.0
    counts: Mapping[str, int] = field(default_factory=dict)
    either: Mapping[str, Any] = field(default_factory=dict)


def options_of(origin: Origin) -> Configured:
    """Read the configuration of a record.

    Raises ValueError for a trainer whose configuration is not known here.
    """
    if not origin.config:
        raise ValueError(TABLES["texts"]["no configuration"])
    name = (origin.trainer or "areal").lower().replace("_", "-")
    name = TABLES["aliases"].get(name, name)
    if name not in TABLES["readable"]:
        raise ValueError(
            TABLES["texts"]["other trainer"].format(origin.trainer, ", ".join(TABLES["readable"]))
        )
    try:
        return of_ours(origin.config) if name == "areal" else configured(name, origin.config)
    except (KeyError, TypeError, AttributeError) as error:
        lacks = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        whose = origin.trainer or "our trainer"
        raise ValueError(f"the recorded configuration is not one of {whose}: {lacks}") from None


def kind_of(name: str, config: Mapping[str, Any]) -> str:
    """Return the table that reads a configuration: that of the kind that its members show.

    Raises ValueError for a kind that no table reads.
    """
    for path, values, kind in TABLES.get(name, {}).get("kinds", ()):
        value = member(config, path)
        shown = {"given": value is not None, "absent": value is None, "a list": isinstance(value, list)}
        if shown[values] if isinstance(values, str) else value in values:
            return kind_of(kind, config)
    if name not in TABLES:
        raise ValueError(f"the recorded configuration is {name}, which is not read here")
    return name


WITHOUT = {"max_norm": inf, "max_length": 1, "context_parallel": 1}  # what 0 and null mean


def value_of(config: Mapping[str, Any], given: Any) -> Any:
    """Return a value of the table: a list is a member, and its default; one that is a list is for null, too."""
    if not isinstance(given, list):
        return given
    if isinstance(given[0], list):
        return tuple(value_of(config, one) for one in given)
    path, usual = (*given, None)[:2]
    if isinstance(usual, list):
        return value_of(config, usual) if (found := member(config, path)) is None else found
    return member(config, path, usual)


def plain(trainer: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the table of a trainer reads from its configuration."""
    table = TABLES[trainer]
    found = {**table["fixed"]}
    for option, row in table["options"].items():
        found[option] = value_of(config, row)
    for option, (path, usual, *values) in table["choices"].items():
        found[option] = value_of(config, values[not member(config, path, usual)])
    for option, (path, usual, name) in table["maps"].items():
        values = TABLES["values"][name]
        found[option] = values.get(str(member(config, path, usual)), values.get("else"))
    for path, usual, cases, changed in table.get("when", ()):
        if (value := member(config, path, usual)) in cases or (value is None and "none" in cases):
            changed = TABLES["sets"][changed] if isinstance(changed, str) else changed
            found |= {option: value_of(config, row) for option, row in changed.items()}
    found |= {option: found[option] or least for option, least in WITHOUT.items() if option in found}
    return with_none(found)


def with_none(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with None for "none", which TOML has no value for."""
    return {option: None if value == "none" else value for option, value in options.items()}


def of_ours(config: Mapping[str, Any]) -> Configured:
    actor, unchecked = config["actor"], dict[str, str]()
    for name, stage in FIRST_STAGE.items():
        if actor.get(name):
            unchecked |= dict.fromkeys(
                ("advantages", "loss")[stage == "loss" :], NOT_COMPUTED.format(f"actor.{name}={actor[name]}")
            )
    if actor.get("mask_no_eos_with_zero") and config.get("critic"):
        unchecked["advantages"] = NOT_COMPUTED.format("mask_no_eos_with_zero and a critic")
    found = configured("areal", config, unchecked)
    return replace(found, trainer=None, dtype=actor.get("dtype"), has_critic=bool(config.get("critic")))


def of_window(found: Configured, config: Mapping[str, Any]) -> Configured:
    """Add what the lengths of accumulation and of a generation batch decide in TRL's GRPO, and CISPO's bounds."""
    given = config.get
    accumulated = given("gradient_accumulation_steps", 1)
    generate_every = (given("steps_per_generation") or accumulated) * given("num_iterations", 1)
    updates = generate_every // accumulated
    late = {"loss": TABLES["texts"]["last update"].format(updates)} if updates > 1 else {}
    is_apart = found.options.correction is not None or accumulated % generate_every
    changed: dict[str, Any] = {"old_logprobs": "trainer" if is_apart else "current"}
    if accumulated > generate_every and found.options.aggregation == "token-mean":
        batches = {"generation_batches": accumulated // generate_every}
        changed |= batches | {"aggregation": "token-mean of each generation batch"}
    if found.options.clipped == CISPO:  # epsilon_high is the largest ratio itself, and no ratio is too small
        most = (found.options.clip_high or found.options.clip_low) - 1
        changed |= {"clip_low": inf, "clip_high": most}
    return replace(found, options=replace(found.options, **changed), unchecked=found.unchecked | late)


def configured(name: str, config: Mapping[str, Any], unchecked: Mapping[str, str] = NOTHING) -> Configured:
    """Read the table of a trainer: its options, counts, sizes, what is not recomputed.

    Counts are whole numbers above 1, by the last part of their names.
    """
    name = kind_of(name, config)
    table = TABLES[name]
    config = {**config, **{section: config[section] for section in table.get("needs", ())}}
    options = Options(**plain(name, config))
    known = {path.rpartition(".")[2]: member(config, path) for path in table["counts"]}
    counts = {name: value for name, value in known.items() if isinstance(value, int) and value > 1}
    found = {
        stage: NOT_COMPUTED.format(f"{path}={value}")
        for stage, path, *usual in table["unchecked"]
        if (value := member(config, path)) not in (*usual, None)
    } | dict(unchecked)
    if "sizes" in table:
        sizes = {kind: member(config, path) for kind, path in table["sizes"].items()}
        samples, step_prompts = sizes["samples"] or 1, sizes.get("step_prompts")
        rows = (sizes["prompts"] or 0) * samples
        batch = sizes.get("step_rows") or (step_prompts or 0) * samples or rows or 1
        options = replace(options, micro_batches=max(1, rows // (sizes["micro_rows"] or rows or 1)))
        counts |= {"the number of micro-batches": options.micro_batches}
        if (updates := rows // batch * (sizes.get("passes") or 1)) > 1:
            found["loss"] = found["values"] = TABLES["texts"]["several updates"].format(updates)
        elif sizes.get("critic_prompts") not in (step_prompts, None):
            found["values"] = "the critic has another number of optimizer steps than the policy"
        elif options.micro_batches > 1 and (reason := table.get("by_version")):
            found["loss"] = found["values"] = reason
    flags = [member(config, path) for path in table.get("precision", ())]  # bf16, which is usual, and fp16
    dtype = "float32" if flags and flags[0] is False and not any(flags[1:]) else None
    temperature = float(member(config, *table["temperature"]) or 1.0)
    path, *usual, kind = table.get("critic", ("", "none"))
    has_critic = member(config, path, *usual) == kind
    result = Configured(
        options, table["source"], table.get("trainer", name), found, dtype, has_critic, temperature, counts,
        table.get("either", {}),
    )  # fmt: skip
    return of_window(result, config) if table.get("is_windowed") else result


def taken(options: Options, *names: str) -> dict[str, Any]:
    """Return some options by name."""
    return {name: getattr(options, name) for name in names}


def as_trl(options: Options) -> Options:
    """Return what TRL computes where it is given these options as far as it has them."""
    return replace(
        options,
        **taken(Options(), *TABLES["trl"]["lacks"]),
        **TABLES["trl"]["fixed"],
        mask=options.mask if options.mask == "without truncated rows" else "loss mask",
        aggregation="token-mean" if options.aggregation == "token-sum" else options.aggregation,
        kl_weight="ratio",
    )


def as_verl(options: Options) -> Options:
    """Return what verl computes where it is given these options as far as it has them."""
    kind = "gae" if options.mean is None else "rloo" if options.leave_one_out else "grpo"
    if kind == "grpo" and options.std is None and options.token_std is not None:
        kind = "reinforce_plus_plus_baseline"
    algorithm = {"adv_estimator": kind, "norm_adv_by_std_in_grpo": options.std is not None}
    algorithm |= {"gamma": options.discount, "lam": options.gae_lambda}
    base = Options(**plain("verl", {"algorithm": algorithm}))
    is_token = options.ratio_level == "token"
    return replace(
        base,
        **taken(options, *TABLES["verl"]["takes"]),
        ratio_level="token" if is_token else "sequence",
        aggregation=options.aggregation if is_token else "seq-mean-token-mean",
        dual_clip=options.dual_clip or 3.0 if is_token else None,
    )
