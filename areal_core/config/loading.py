"""Load a config from YAML and dotted overrides; convert it to plain JSON types and back."""

import copy
import dataclasses
import io
import logging
import os
import re
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_core.config.checks import check_config
from areal_core.config.derived import derive_options
from areal_core.config.experiment import BaseExperimentConfig, PPOConfig
from areal_core.config.names import help_of, missing_options, refuse_unknown_keys, sections_of, unknown_keys
from areal_core.config.option import Role
from areal_core.config.presets import expand_preset, leaves, option_name, set_option, split_algorithm
from areal_core.config.upstream import translate_older_names, without_gone
from areal_core.errors import ConfigError
from areal_core.safety.received import UnreadableFile, read_received
from areal_core.safety.secrets import masker

C = TypeVar("C")  # any dataclass of options
E = TypeVar("E", bound=BaseExperimentConfig)
logger = logging.getLogger(__name__)
MOST_YAML_BYTES = 1 << 24


def load_expr_config(argv: Sequence[str], cls: type[E], role: Role = "train") -> tuple[E, str]:
    """Read a config from a YAML file and overrides, check it, and log what was derived or ignored.

    Args:
        argv: `[script.py] --config FILE.yaml [OPTION=VALUE]... [~OPTION]...`; `~OPTION` resets one
            to its default. With `--help`, print this and exit.
        cls: class of the config, such as `GRPOConfig`, `SFTConfig`, `RWConfig` or `DPOConfig`.
        role: "rollout" checks only the options that rollouts need.

    Returns:
        The config, and the path of the file.

    Raises:
        ConfigError: the file cannot be read, an option is unknown or missing, or options contradict
            each other.
    """
    if {"-h", "--help"} & set(argv):
        print(usage(cls))
        raise SystemExit(0)
    config, path, notes = load_with_notes(argv, cls, role)
    if os.environ.get("RANK", "0") == "0":  # every rank reads the same file; rank 0 reports
        for note in notes:
            logger.warning("%s: %s", path, note)
    return config, path


def usage(cls: type[BaseExperimentConfig]) -> str:
    """Return the help of a training script: its arguments, sections and required options."""
    fields = [field for field in dataclasses.fields(cls) if field.metadata]
    sections = {name: help_of(cls, name) for name, nested in sections_of(cls).items() if nested is not None}
    own = [field.name for field in dataclasses.fields(cls) if not field.metadata]
    plain = [field.name for field in fields if field.name not in sections]
    lines = [
        "usage: python SCRIPT.py --config FILE.yaml [OPTION=VALUE]... [~OPTION]...",
        "",
        f"Options are those of {cls.__name__}, in the file or as OPTION=VALUE, which takes precedence:",
        "actor.optimizer.lr=1e-5 sets one, ~actor.eps_clip resets one to its default.",
        "",
        *(f"  {name:<15} {help}" for name, help in sections.items()),
        "",
        *textwrap.wrap(f"Others: {', '.join(plain)}.", 78, break_on_hyphens=False),
        *([f"Of the script: {', '.join(own)}."] if own else []),
        "",
        "Type, default and help of each option: areal-debug info options [SECTION|SEARCH]",
    ]
    return "\n".join(lines)


def load_with_notes(argv: Sequence[str], cls: type[E], role: Role = "train") -> tuple[E, str, list[str]]:
    """Read `[script.py] --config x.yaml a.b=c +a.b=c ~a.b` into `cls` and check it.

    `a.b=c` and `+a.b=c` both set an option, `~a.b` resets it to its default; `algorithm` names a
    preset (presets.py). With role "rollout" only the options that rollouts need are checked.

    Returns:
        The config, the file's path, and notes on older names, on what a preset has set, on values
        that were chosen for options that are not given, and on options that have no effect here.

    Raises:
        ConfigError: an unknown option, inconsistent values, or a feature that is not supported.
    """
    arguments = list(argv[1:]) if argv and argv[0].endswith(".py") else list(argv)
    path, overrides = split_arguments(arguments)
    tree = read_yaml(path)
    algorithm = tree.pop("algorithm", None) if issubclass(cls, PPOConfig) else None
    notes = translate_older_names(tree, cls)
    problems = list(unknown_keys(tree, cls, path))
    given = [name for name, _ in leaves(tree)]
    if issubclass(cls, PPOConfig):
        chosen, overrides = split_algorithm(overrides)
        if chosen:
            algorithm, given = chosen[-1], [option_name(override) for override in overrides]
    if algorithm:
        notes.append(expand_preset(tree, str(algorithm), given))
    for override in overrides:
        try:
            notes += apply_override(tree, override, cls)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    notes += derive_options(tree, cls, path, role)
    config = built(tree, cls, path)
    return config, path, [*notes, *check_config(config, role)]


def config_from_dict(tree: dict[str, Any], cls: type[C], source: str = "config") -> C:
    """Build `cls` from nested dicts, whose text stands for itself; `source` names them in errors.

    Inverse of `config_to_dict`. Raises ConfigError.
    """
    return built(literal(tree), cls, source)


def literal(options: Any) -> Any:
    """Return options in which no text is an interpolation: `${oc.env:X}` stays as it is."""
    if isinstance(options, dict):
        return {name: literal(value) for name, value in options.items()}
    if isinstance(options, list | tuple):
        return [literal(value) for value in options]
    if isinstance(options, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", options)
    return options


def built(tree: dict[str, Any], cls: type[C], source: str) -> C:
    """Build `cls` from nested dicts, with their interpolations resolved. Raises ConfigError."""
    given = without_gone(tree)
    refuse_unknown_keys(given, cls, source)
    try:
        merged = OmegaConf.merge(schema_of(cls), given)  # type: ignore[arg-type]  # a class is hashable
        missing = next(missing_options(container_of(merged)), None)
        if missing is None:
            built: Any = OmegaConf.to_object(merged)
            return built
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{source}: {error.full_key or 'the file'}: {reason}") from None
    raise ConfigError(f"{source}: {missing} must be given: {help_of(cls, missing)}")


@cache
def schema_of(cls: type) -> Any:
    """Return the options of a class and their defaults; a merge copies it."""
    return OmegaConf.structured(cls)


def config_to_dict(config: Any) -> dict[str, Any]:
    """Return nested dicts and lists of JSON types, every option included."""
    return dataclasses.asdict(config)


def masked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with every credential as `***`, for anything that is stored or sent."""
    masked: dict[str, Any] = masker().tree(options)
    return masked


def split_arguments(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the value of `--config`, at any position, and the overrides. Raises ConfigError."""
    path, overrides, rest = "", [], iter(arguments)
    for argument in rest:
        if argument == "--config":
            path = next(rest, "")
        elif argument.startswith("--config="):
            path = argument.removeprefix("--config=")
        elif argument.startswith("-"):
            raise ConfigError(
                f"unknown argument {argument!r}; expected --config FILE and overrides such as seed=2"
            )
        else:
            overrides.append(argument)
    if not path:
        raise ConfigError("no configuration given; add --config FILE.yaml")
    return path, overrides


def read_yaml(path: str) -> dict[str, Any]:
    """Return the file as nested dicts, interpolations not yet resolved. Raises ConfigError."""
    try:
        text = read_received(path, MOST_YAML_BYTES).decode()
        tree = container_of(OmegaConf.load(io.StringIO(text))) if text.strip() else {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} cannot be read: it is not text") from None
    except UnreadableFile as error:
        raise ConfigError(str(error)) from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a list; expected options such as 'seed: 1'")
    return tree


def container_of(options: Any) -> Any:
    return OmegaConf.to_container(options, resolve=False)


def apply_override(tree: dict[str, Any], override: str, cls: type) -> list[str]:
    """Change `tree` by one `a.b=c`, `+a.b=c` or `~a.b`; return notes on older names.

    Raises ConfigError.
    """
    source = f"override {override!r}"
    key, equals, text = override.removeprefix("+").partition("=")
    delete = override.startswith("~")
    if not delete and (not equals or not key):
        raise ConfigError(f"{source}: expected option=value, +option=value or ~option")
    option, value = key.removeprefix("~"), None if delete else parsed_value(source, text)
    changes, notes = renamed(option, value, cls)
    for new_option, new_value in changes.items():
        nested: dict[str, Any] = {}
        set_option(nested, new_option, new_value)
        refuse_unknown_keys(nested, cls, source)
        *parents, leaf = new_option.split(".")
        node = tree
        for part in parents:
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
            if not isinstance(node, dict):
                raise ConfigError(f"{source}: {part} is not a section but {node!r}")
        if delete:
            node.pop(leaf, None)
        else:
            node[leaf] = new_value
    return notes


def renamed(option: str, value: Any, cls: type) -> tuple[dict[str, Any], list[str]]:
    """Return the options that an override sets, with older names translated, and notes on them."""
    nested: dict[str, Any] = {}
    set_option(nested, option, value)
    before = copy.deepcopy(nested)
    notes = (
        translate_older_names(nested, cls, is_override=True) if issubclass(cls, BaseExperimentConfig) else []
    )
    return ({option: value} if nested == before else dict(leaves(nested))), notes


def parsed_value(source: str, text: str) -> Any:
    """Parse `text` as YAML, as in a config file: numbers, true, null, [1, 2], {a: 1}.

    Raises ConfigError.
    """
    try:
        return container_of(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{source}: the value is not valid YAML: {' '.join(str(error).split())}") from None
