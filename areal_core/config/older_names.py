"""Translation of option names of upstream's versions 0.4 to 2.0, before any other processing.

Each translation is reported in a sentence, so that a file and its run never differ silently.
"""

import copy
from collections.abc import Iterator
from typing import Any

from areal_core.config.experiment import DPOConfig, PPOConfig, RWConfig, SFTConfig
from areal_core.errors import ConfigError

Tree = dict[str, Any]
ENGINES = ("actor", "ref", "critic", "teacher")
RENAMED = {
    "rollout.openai": "rollout.agent",  # 0.5.3 to 1.0.3
    "rollout.admin_api_key": "rollout.agent.admin_api_key",  # 2.0 has both
    "perf_tracer.request_tracer": "perf_tracer.session_tracer",  # 0.4
    **{f"{engine}.mb_spec.max_tokens_per_gpu": f"{engine}.mb_spec.max_tokens_per_mb" for engine in ENGINES},
}
# Removed options, of upstream and of records of earlier versions, with the value that has no
# effect.
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
    if not issubclass(cls, PPOConfig) and "model" in tree:  # supervised methods, before 0.5
        move(tree, "model", "actor")
        redirect_interpolations(tree, "${model.", "${actor.")
        notes.append("model is called actor")
    for older, newer in RENAMED.items():
        if move(tree, older, newer):
            notes.append(f"{older} is called {newer}")
    drop_gone(tree)
    notes += [*periods_of_checkpointer(tree), *engine_of_teacher(tree)]
    if not is_override:
        notes += [*type_of_rows(tree, cls), *rollouts_of_supervised(tree, cls)]
    actor = tree.get("actor")
    if issubclass(cls, PPOConfig) and isinstance(actor, dict):
        notes += [*bounds_of_behaviour_weights(actor, is_override)]
    return notes


def drop_gone(tree: Tree) -> None:
    for gone, harmless in GONE.items():
        section, leaf = holder(tree, gone)
        if leaf in section and section[leaf] == harmless:
            del section[leaf]


def without_gone(tree: Tree) -> Tree:
    """Return a copy without removed options that have the value without effect.

    Records of earlier versions have `vllm: null`, for a section that was not read.
    """
    found = copy.deepcopy({name: value for name, value in tree.items() if (name, value) != ("vllm", None)})
    drop_gone(found)
    return found


def rollouts_of_supervised(tree: Tree, cls: type) -> Iterator[str]:
    """Drop the sampling options of a supervised file, which has none of its own here."""
    if issubclass(cls, PPOConfig) or kind_of_rows(tree) not in SUPERVISED:
        return
    if dropped := [name for name in ROLLOUT_SECTIONS if tree.pop(name, None) is not None]:
        yield f"{', '.join(dropped)} {'has' if len(dropped) == 1 else 'have'} no effect: a supervised method samples nothing"


def kind_of_rows(tree: Tree) -> str:
    """Return `train_dataset.type` of a file, "" without one."""
    data = tree.get("train_dataset")
    return str(data.get("type", "")) if isinstance(data, dict) else ""


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
