"""Each option is read by the code, or has a note or a refusal when it is set.

Reads are found in the syntax trees: attributes of variables whose class is known from annotations
and assignments. `config.actor.optimizer.lr` and `options.lr` of an `options: OptimizerConfig` are
reads of `lr` of that section; an attribute of an unknown object is none.
"""

import ast
import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from areal_core.config import (
    DPOConfig,
    GRPOConfig,
    RWConfig,
    SFTConfig,
    check_config,
    experiment,
    generation,
    services,
    train_engine,
)
from areal_core.config.checks import flat_values
from areal_core.config.names import sections_of
from areal_core.errors import ConfigError
from areal_core.rollout.types import Sampling

ROOT = Path(__file__).parents[2]
CODE = ("areal_core", "areal_debug", "consistency", "replayer")
# Files that compare or list options without using them.
NOT_USES = ("checks.py", "policy_checks.py", "derived.py", "not_yet.py", "vision.py", "older_names.py")
CLASSES: dict[str, type] = {
    name: value
    for module in (experiment, generation, services, train_engine)
    for name, value in vars(module).items()
    if dataclasses.is_dataclass(value) and value.__module__ == module.__name__
} | {"GRPOConfig": GRPOConfig}
RUNS = (GRPOConfig, SFTConfig, RWConfig, DPOConfig)
# (class, exact): of an annotated variable also its subclasses, of the section of a config not.
Types = frozenset[tuple[type, bool]]
NONE: Types = frozenset()


class Scan:
    """The (class, exact, option) triples that functions read, in all files of `CODE`."""

    def __init__(self) -> None:
        self.reads: set[tuple[type, bool, str]] = set()
        self.attributes: dict[str, Types] = {}  # of objects of the code, by name: self.config
        self.returns: dict[str, Types] = {}
        self.aliases: dict[str, Types] = {}
        trees = [ast.parse(file.read_text()) for file in code_files()]
        for tree in trees:
            self.collect(tree)
        functions = [
            (function, list(ast.walk(function))) for tree in trees for function in functions_in(tree)
        ]
        for _ in range(2):  # an attribute may be assigned from one of a class that is read later
            for function, nodes in functions:
                self.read_function(function, nodes)

    def collect(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                if isinstance(node.value, ast.BinOp) and (found := self.annotated(node.value)):
                    self.aliases[node.targets[0].id] = found
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
                if found := self.annotated(node.returns):
                    self.returns[node.name] = found
            elif isinstance(node, ast.ClassDef) and node.name not in CLASSES:
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and (found := self.annotated(item.annotation)):
                        self.attributes[item.target.id] = self.attributes.get(item.target.id, NONE) | found

    def annotated(self, annotation: ast.expr) -> Types:
        """Return the config classes in an annotation; a run's class stands for every method."""
        text = ast.unparse(annotation).replace("'", "").replace('"', "")
        words = "".join(c if c.isalnum() or c == "_" else " " for c in text).split()
        found = {(CLASSES[word], False) for word in words if word in CLASSES}
        found |= {one for word in words for one in self.aliases.get(word, NONE)}
        if any(cls is experiment.BaseExperimentConfig for cls, _ in found):
            found |= {(cls, False) for cls in RUNS}
        return frozenset(found)

    def read_function(self, function: ast.FunctionDef | ast.AsyncFunctionDef, nodes: list[ast.AST]) -> None:
        arguments = function.args
        scope = {
            argument.arg: self.annotated(argument.annotation)
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            if argument.annotation is not None
        }
        for _ in range(2):
            for node in nodes:
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        self.assign(target, node.value, scope)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    scope[node.target.id] = self.annotated(node.annotation)
                elif isinstance(node, ast.NamedExpr):
                    self.assign(node.target, node.value, scope)
                elif isinstance(node, ast.For | ast.comprehension):
                    self.assign(node.target, node.iter, scope)
        for node in nodes:
            if isinstance(node, ast.Attribute):
                self.types_of(node, scope)
            elif isinstance(node, ast.Call) and is_name(node.func, "fields") and node.args:
                for cls, exact in self.types_of(node.args[0], scope):
                    self.reads |= {(cls, exact, field.name) for field in dataclasses.fields(cls)}

    def assign(self, target: ast.expr, value: ast.expr, scope: dict[str, Types]) -> None:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for one, other in zip(target.elts, value.elts, strict=True):
                self.assign(one, other, scope)
            return
        found = self.types_of(value, scope)
        for node in target.elts if isinstance(target, ast.Tuple) else [target]:
            if found and isinstance(node, ast.Name):
                scope[node.id] = scope.get(node.id, NONE) | found
            elif found and isinstance(node, ast.Attribute):
                self.attributes[node.attr] = self.attributes.get(node.attr, NONE) | found

    def types_of(self, node: ast.expr, scope: dict[str, Types]) -> Types:
        """Return the config classes that an expression may have; record the reads in it."""
        if isinstance(node, ast.Name):
            return scope.get(node.id, NONE)
        if isinstance(node, ast.Attribute):
            owners = self.types_of(node.value, scope)
            if not owners:
                return self.attributes.get(node.attr, NONE)
            found = {one for one in owners if node.attr in field_names(one[0])}
            self.reads |= {(cls, exact, node.attr) for cls, exact in found}
            nested = {sections_of(cls)[node.attr] for cls, _ in found}
            return frozenset((cls, True) for cls in nested if cls is not None)
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if name == "replace" and node.args:
                return self.types_of(node.args[0], scope)
            return frozenset({(CLASSES[name], True)}) if name in CLASSES else self.returns.get(name, NONE)
        if isinstance(node, ast.BoolOp | ast.IfExp | ast.Tuple | ast.List | ast.Dict):
            parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
            return frozenset().union(*(self.types_of(part, scope) for part in parts))
        return NONE


def is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def last_name(function: ast.expr) -> str:
    """Return the name of a function that is called, without its owner; "" of another expression."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


@cache
def field_names(section: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(section))


def code_files() -> Iterator[Path]:
    for package in CODE:
        for file in sorted((ROOT / package).rglob("*.py")):
            if not (file.parent.name == "config" and file.name in NOT_USES):
                yield file


def functions_in(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for owner in ast.walk(tree):
        for node in ast.iter_child_nodes(owner):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if isinstance(owner, ast.ClassDef) and owner.name in CLASSES and node.args.args:
                    node.args.args[0].annotation = ast.Name(owner.name)
                yield node


@cache
def reads() -> set[tuple[type, bool, str]]:
    by_name = {(generation.GenerationHyperparameters, True, f.name) for f in dataclasses.fields(Sampling)}
    return Scan().reads | by_name


def options_of(cls: type, prefix: str = "") -> Iterator[tuple[str, type, str]]:
    """Yield (dotted name, class of its section, name) of every option of a config class."""
    for name, section in sections_of(cls).items():
        if section is None:
            yield prefix + name, cls, name
        else:
            yield from options_of(section, f"{prefix}{name}.")


def is_read(section: type, name: str) -> bool:
    return any(
        name == read and (section is cls or (issubclass(section, cls) and not exact))
        for cls, exact, read in reads()
    )


def complete_config() -> GRPOConfig:
    """Return a consistent config in which every optional section is present."""
    config = GRPOConfig(experiment_name="a", trial_name="b", allocation_mode="sglang:d1+fsdp:d2")
    fill(config)
    for model in (config.actor, config.ref, config.critic, config.teacher, config.reward_model):
        model.path, model.optimizer = "model", train_engine.OptimizerConfig()
    for policy in (config.actor, config.ref):
        policy.rejection_sampling = policy.reward_norm = policy.adv_norm = None
    config.actor.ppo_n_minibatches = config.critic.ppo_n_minibatches = 1
    for data in (config.train_dataset, config.valid_dataset):
        data.path, data.type, data.batch_size = "data", "rl", 8
    config.rollout.consumer_batch_size = 8
    return config


def fill(section: Any) -> None:
    for name, nested in sections_of(type(section)).items():
        if nested is not None:
            if getattr(section, name) is None:
                setattr(section, name, nested())
            fill(getattr(section, name))


def another_value(option: str, old: Any, choices: tuple[Any, ...]) -> Any:
    if choices:
        return next(choice for choice in choices if choice != old)
    if isinstance(old, bool):
        return not old
    if isinstance(old, int | float):
        return old + 1
    if option.endswith("queue_size"):
        return 1000
    has_parts = isinstance(old, dict) or "scheduling" in option
    return {"cpu": 1} if has_parts else ["a"] if isinstance(old, list) else "another"


def sentences(option: str, choices: tuple[Any, ...]) -> str:
    """Return the notes, or the refusal, of a complete config with another value of an option."""
    config = complete_config()
    *parents, leaf = option.split(".")
    section: Any = config
    for parent in parents:
        section = getattr(section, parent)
    setattr(section, leaf, another_value(option, getattr(section, leaf), choices))
    try:
        return "\n".join(check_config(config))
    except ConfigError as error:
        return str(error)


# Options whose only meaning is what the checks compare them with.
ASSERTIONS = (
    "async_training",
    "actor.reward_norm.group_size",
    "actor.adv_norm.group_size",
    "actor.group_size",
)
# Sections of which any use is noted, whatever is in them.
NOTED_SECTIONS = ("ref.reward_norm", "ref.adv_norm", "ref.rejection_sampling")
# A critic and a reward model have a head with and without it.
WITHOUT_CHOICE = ("critic.is_critic", "reward_model.is_critic")


def unread_options() -> list[tuple[str, tuple[Any, ...]]]:
    found = []
    for option, section, name in options_of(GRPOConfig):
        if not is_read(section, name) and not name.startswith("_"):
            [field] = [field for field in dataclasses.fields(section) if field.name == name]
            choices = field.metadata["choices"]
            is_known = option in ASSERTIONS + WITHOUT_CHOICE or option.startswith(NOTED_SECTIONS)
            if len(choices) != 1 and not is_known:
                found.append((option, choices))
    return found


def test_a_complete_config_has_no_notes():
    assert check_config(complete_config()) == []


def test_an_option_that_nothing_reads_is_noted_or_refused():
    unread = unread_options()
    assert {option for option, _ in unread} <= set(flat_values(complete_config()))
    assert "scheduler.endpoint" in dict(unread)
    assert [option for option, choices in unread if option not in sentences(option, choices)] == []


@pytest.mark.parametrize("section", NOTED_SECTIONS)
def test_a_section_without_effect_is_noted(section):
    config = complete_config()
    name = section.removeprefix("ref.")
    setattr(config.ref, name, sections_of(train_engine.PPOActorConfig)[name]())
    assert check_config(config) == [f"{section} has no effect: a reference only computes logprobs"]


def test_reads_are_found_by_section_and_not_by_name_alone():
    assert is_read(train_engine.OptimizerConfig, "lr")
    assert is_read(experiment.DatasetConfig, "shuffle")
    assert not is_read(experiment.ValidDatasetConfig, "shuffle")
    assert not is_read(train_engine.OptimizerConfig, "hysteresis")
    assert not is_read(services.SchedulerConfig, "endpoint")
    assert not is_read(train_engine.PPOCriticConfig, "weight_update_mode")
