"""Options of upstream, 0.4 to 2.0, in the names and with the features that this version has.

Names are translated before any other processing, each with a sentence, so that a file and its run
never differ silently. An option that loads and whose feature is not supported is refused if it
would change results, and gets a note otherwise.
"""

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from areal_core.config.experiment import BaseExperimentConfig, DPOConfig, PPOConfig, RWConfig, SFTConfig
from areal_core.config.import_paths import ours
from areal_core.config.presets import leaves
from areal_core.config.train_engine import PPOActorConfig, TrainEngineConfig
from areal_core.errors import ConfigError

Tree = dict[str, Any]
ENGINES = ("actor", "ref", "critic", "teacher")
RENAMED = {
    "rollout.openai": "rollout.agent",  # 0.5.3 to 1.0.3
    "rollout.admin_api_key": "rollout.agent.admin_api_key",  # 2.0 has both
    "perf_tracer.request_tracer": "perf_tracer.session_tracer",  # 0.4
    **{f"{engine}.mb_spec.max_tokens_per_gpu": f"{engine}.mb_spec.max_tokens_per_mb" for engine in ENGINES},
}
# Removed options, of upstream and of earlier records, with the value that has no effect.
GONE = {
    "server_only": False,
    "rollout.rescore_share": 0.0,
    **{f"{engine}.fsdp.ulysses_sp_size": 1 for engine in ENGINES},
}
ROWS = {PPOConfig: "rl", SFTConfig: "sft", RWConfig: "rw", DPOConfig: "dpo"}
SUPERVISED = ("sft", "rw", "dpo")
ROLLOUT_SECTIONS = ("gconfig", "eval_gconfig", "rollout", "async_training", "dynamic_bs")
CAP, MODE = "behave_imp_weight_cap", "behave_imp_weight_mode"  # 0.5.3 to 1.0.2
MODES = {
    "token_mask": ("token", "mask"),
    "token_truncate": ("token", "clamp"),
    "sequence_mask": ("sequence", "mask"),
    "sequence_truncate": ("sequence", "clamp"),
}


def translate_older_names(tree: Tree, cls: type, is_override: bool = False) -> list[str]:
    """Change a file's `tree` in place; return one sentence for each translated name.

    Args:
        is_override: `tree` is one override. It sets what it names, and no default of an older
            version.

    Raises:
        ConfigError: an older option has an unknown value, or is given together with the newer one.
    """
    notes = []
    if not issubclass(cls, PPOConfig) and "model" in tree:  # supervised methods, before 0.5.2
        move(tree, "model", "actor")
        redirect_interpolations(tree, "${model.", "${actor.")
        notes.append("model is called actor")
    for older, newer in RENAMED.items():
        if move(tree, older, newer):
            notes.append(f"{older} is called {newer}")
    drop_gone(tree)
    notes += drop_foreign(tree)
    notes += [*periods_of_checkpointer(tree), *engine_of_teacher(tree)]
    if not is_override:
        notes += [*type_of_rows(tree, cls), *rollouts_of_supervised(tree, cls)]
    actor = tree.get("actor")
    if issubclass(cls, PPOConfig) and isinstance(actor, dict):
        if isinstance(actor.get("gae_lambda"), str) and "${" not in actor["gae_lambda"]:
            actor["gae_lambda_fn"] = ours(actor.pop("gae_lambda"))
            notes.append(f"actor.gae_lambda is called actor.gae_lambda_fn={actor['gae_lambda_fn']}")
        notes += [*bounds_of_behaviour_weights(actor, is_override)]
    return notes


def drop_gone(tree: Tree) -> None:
    for gone, harmless in GONE.items():
        section, leaf = holder(tree, gone)
        if leaf in section and section[leaf] == harmless:
            del section[leaf]


def drop_foreign(tree: Tree) -> list[str]:
    """Drop options of upstream that have no section here; return notes on those that are set.

    Raises ConfigError: one of them would change results.
    """
    gone = [row.option for row in NOT_YET if row.gone]
    given = {n: value for n, value in leaves(tree) if any(is_row_of(option, n) for option in gone)}
    if refused := "\n".join(not_yet(given, refused=True)):
        raise ConfigError(refused)
    for name in given:
        section, leaf = holder(tree, name)
        del section[leaf]
    return list(not_yet(given, refused=False))


def without_gone(tree: Tree) -> Tree:
    """Return a copy without removed options that have the value without effect.

    Records of earlier versions have `vllm: null`, for a section that was not read.
    """
    found = copy.deepcopy({name: value for name, value in tree.items() if (name, value) != ("vllm", None)})
    drop_gone(found)
    return found


def rollouts_of_supervised(tree: Tree, cls: type) -> Iterator[str]:
    """Drop the sampling options of a supervised file, which has none of its own here."""
    data = tree.get("train_dataset")
    kind = data.get("type", "") if isinstance(data, dict) else ""
    if issubclass(cls, PPOConfig) or str(kind) not in SUPERVISED:
        return
    if dropped := [name for name in ROLLOUT_SECTIONS if tree.pop(name, None) is not None]:
        yield f"{', '.join(dropped)} {'has' if len(dropped) == 1 else 'have'} no effect: a supervised method samples nothing"


def move(tree: Tree, older: str, newer: str) -> bool:
    """Rename an option, which may go to a section below its own; return False if it is not given.

    Raises ConfigError if both names are given, with different values.
    """
    section, old_leaf = holder(tree, older)
    if old_leaf not in section:
        return False
    target = section
    for name in newer.split(".")[older.count(".") : -1]:
        if target.get(name) is None:
            target[name] = {}
        target = target[name]
        if not isinstance(target, dict):  # refused as no section, with the older name
            return False
    value = section.pop(old_leaf)
    if target.setdefault(newer.split(".")[-1], value) != value:
        raise ConfigError(f"{older} is another name of {newer}, and both are given: keep the second")
    return True


def holder(tree: Tree, option: str) -> tuple[Tree, str]:
    """Return the section of an option, {} if it does not exist, and the last part of its name."""
    *sections, leaf = option.split(".")
    for section in sections:
        nested = tree.get(section)
        tree = nested if isinstance(nested, dict) else {}
    return tree, leaf


def redirect_interpolations(tree: Tree, older: str, newer: str) -> None:
    for key, value in tree.items():
        if isinstance(value, dict):
            redirect_interpolations(value, older, newer)
        elif isinstance(value, str):
            tree[key] = value.replace(older, newer)


def periods_of_checkpointer(tree: Tree) -> Iterator[str]:
    if not isinstance(tree.get("checkpointer"), dict):
        return
    periods = {name: value for name, value in tree.pop("checkpointer").items() if name.startswith("freq_")}
    recover = tree.setdefault("recover", {})
    if not any(name in recover for name in periods):
        recover |= periods
    yield "checkpointer is called recover, which defines whether and how often recovery checkpoints are written"


def engine_of_teacher(tree: Tree) -> Iterator[str]:
    teacher = tree.get("teacher")
    if not isinstance(teacher, dict) or not {"engine_type", "rollout", "train"} & set(teacher):
        return
    kind = teacher.get("engine_type", "rollout")
    if kind not in ("rollout", "train"):
        raise ConfigError(f"teacher.engine_type is {kind!r}; expected rollout or train")
    teacher.pop("engine_type", None)
    sections = {name: teacher.pop(name, None) for name in ("rollout", "train")}
    if kind == "train" and isinstance(sections["train"], dict):
        teacher |= sections["train"] | teacher
        yield "teacher.train is called teacher"
    elif kind == "rollout":
        yield "teacher.engine_type is rollout: the ranks of the actor compute the teacher's log-probs, without servers of its own"


def type_of_rows(tree: Tree, cls: type) -> Iterator[str]:
    data = tree.get("train_dataset")
    if not isinstance(data, dict) or "type" in data:
        return
    for method, kind in ROWS.items():
        if issubclass(cls, method):
            data["type"] = kind
            yield f"train_dataset.type is assumed to be {kind}, the rows of this method"


def bounds_of_behaviour_weights(actor: Tree, is_override: bool) -> Iterator[str]:
    """Translate a cap and a mode into `rejection_sampling`; of an override, what it sets."""
    if CAP not in actor and MODE not in actor:
        return
    if "rejection_sampling" in actor:
        raise ConfigError(
            f"actor.{CAP} or actor.{MODE} is given together with actor.rejection_sampling: keep only the latter"
        )
    of_cap, of_mode = (
        ({"metric", "upper"} if CAP in actor else set()),
        ({"level", "action"} if MODE in actor else set()),
    )
    cap, mode = actor.pop(CAP, 5.0), actor.pop(MODE, "token_mask")
    if mode == "disabled" or cap is None:
        if is_override:
            actor["rejection_sampling"] = None
        yield f"actor.{MODE} is {mode} with the cap {cap}: a decoupled loss still corrects for the behaviour policy, unbounded"
        return
    if mode not in MODES:
        raise ConfigError(f"actor.{MODE} is {mode!r}; expected one of {', '.join(MODES)}, disabled")
    level, action = MODES[mode]
    bounds = {"level": level, "action": action, "metric": "ratio", "upper": cap}
    if is_override:
        bounds = {name: value for name, value in bounds.items() if name in of_cap | of_mode}
    actor["rejection_sampling"] = bounds
    shown = ", ".join(f"{name}: {value}" for name, value in bounds.items() if name != "metric")
    yield f"actor.{CAP} and actor.{MODE} became actor.rejection_sampling {{{shown}}}"


@dataclass(frozen=True)
class NotYet:
    """An option that loads, but whose feature is not supported.

    `harmless` lists the values that change nothing. Any other is refused or, if it cannot affect
    training, noted. One that is `gone` is no option of ours, and dropped from a file.
    """

    option: str
    harmless: tuple[Any, ...]
    instead: str
    refused: bool = True
    gone: bool = False


@cache
def is_row_of(pattern: str, name: str) -> bool:
    """Return whether the row of NotYet with this pattern is that of an option."""
    section, _, rest = name.partition(".")
    spelled = f"MODEL.{rest}" if section in ENGINES else name
    return fnmatch(name, pattern) or fnmatch(spelled, pattern)


ROWS_NOT_YET = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
NOT_YET = tuple(NotYet(**row | {"harmless": tuple(row["harmless"])}) for row in ROWS_NOT_YET)
RUN_NAMES = ("experiment_name", "trial_name", "fileroot")


def not_yet(values: dict[str, Any], refused: bool) -> Iterator[str]:
    """Yield one sentence for each unsupported feature that the values of options request."""
    for row in NOT_YET:
        if row.refused != refused:
            continue
        given = [
            f"{name} is {shown(value)}"
            for name, value in values.items()
            if is_row_of(row.option, name) and value not in row.harmless
        ]
        if given:
            yield f"{', '.join(given)}, which is not available: {row.instead}"


def shown(value: Any) -> str:
    """Return the value, or `given` for a section."""
    return "given" if dataclasses.is_dataclass(value) or isinstance(value, dict) else repr(value)


def names_of_another_run(config: BaseExperimentConfig, values: dict[str, Any]) -> Iterator[str]:
    run = dict(
        zip(RUN_NAMES, (config.experiment_name, config.trial_name, config.cluster.fileroot), strict=True)
    )
    for name, value in values.items():
        leaf = name.rpartition(".")[2]
        if "." in name and leaf in run and value and value != run[leaf] and name != "cluster.fileroot":
            of_run = "cluster.fileroot" if leaf == "fileroot" else leaf
            yield f"{name} is {value!r} and {of_run} is {run[leaf]!r}: the latter is used everywhere"


def without_effect_on_a_model(config: BaseExperimentConfig) -> Iterator[str]:
    """Yield sentences on options of models that are not trained, or not served."""
    ref = getattr(config, "ref", None)
    if isinstance(ref, PPOActorConfig):
        plain, default = {field.name for field in dataclasses.fields(TrainEngineConfig)}, PPOActorConfig()
        given = [
            f"ref.{field.name}"
            for field in dataclasses.fields(ref)
            if field.name not in plain and getattr(ref, field.name) != getattr(default, field.name)
        ]
        if given:
            yield f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect: a reference only computes logprobs"
    for name in ("ref", "critic", "teacher", "reward_model"):
        model, actor = getattr(config, name, None), config.actor
        if model is None:
            continue
        if model.backend not in ("", actor.backend):
            yield f"{name}.backend is {model.backend!r}, which has no effect: all models are on the ranks of the actor"
        if model.weight_update_mode not in (TrainEngineConfig.weight_update_mode, actor.weight_update_mode):
            yield f"{name}.weight_update_mode is {model.weight_update_mode!r}, which has no effect: only the actor is sent to servers"
