"""Load a config from YAML and dotted overrides; convert it to plain JSON types and back."""

import dataclasses
import difflib
import logging
import os
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_core.config.checks import check_config
from areal_core.config.experiment import BaseExperimentConfig, PPOConfig
from areal_core.config.older_names import translate_older_names
from areal_core.config.option import REQUIRED
from areal_core.config.presets import expand_preset, leaves, option_name, split_algorithm
from areal_core.errors import ConfigError

C = TypeVar("C")  # any dataclass of options
E = TypeVar("E", bound=BaseExperimentConfig)
logger = logging.getLogger(__name__)
ELSEWHERE = {  # options of upstream that were removed, or are not supported here
    "model": "it is called 'actor'",
    "behave_imp_weight_cap": "use rejection_sampling.upper",
    "behave_imp_weight_mode": "use rejection_sampling.level and rejection_sampling.action",
    "server_only": "an allocation such as 'sglang:d4' starts servers only",
    "ulysses_sp_size": "it is the c of the allocation, as in 'fsdp:d2c2'",
    "megatron": "there is no Megatron engine; remove the section",
    "archon": "there is no Archon engine; remove the section",
}


def load_expr_config(argv: Sequence[str], cls: type[E]) -> tuple[E, str]:
    """Read a config as `load_with_notes` does, log its notes, and return it with the file's path.

    Raises ConfigError.
    """
    config, path, notes = load_with_notes(argv, cls)
    if os.environ.get("RANK", "0") == "0":  # every rank reads the same file; rank 0 reports
        for note in notes:
            logger.warning("%s: %s", path, note)
    return config, path


def load_with_notes(argv: Sequence[str], cls: type[E]) -> tuple[E, str, list[str]]:
    """Read `[script.py] --config x.yaml a.b=c +a.b=c ~a.b` into `cls` and check it.

    `a.b=c` and `+a.b=c` both set an option, `~a.b` resets it to its default; `algorithm` names a
    preset (presets.py).

    Returns:
        The config, the file's path, and notes on older names, on what a preset has set, and on
        options that have no effect here.

    Raises:
        ConfigError: an unknown option, inconsistent values, or a feature that is not supported.
    """
    arguments = list(argv[1:]) if argv and argv[0].endswith(".py") else list(argv)
    path, overrides = split_arguments(arguments)
    tree = read_yaml(path)
    algorithm = tree.pop("algorithm", None) if issubclass(cls, PPOConfig) else None
    notes = translate_older_names(tree, cls)
    refuse_unknown_keys(tree, cls, path)
    given = [name for name, _ in leaves(tree)]
    if issubclass(cls, PPOConfig):
        chosen, overrides = split_algorithm(overrides)
        if chosen:
            algorithm, given = chosen[-1], [option_name(override) for override in overrides]
    if algorithm:
        notes.append(expand_preset(tree, str(algorithm), given))
    for override in overrides:
        apply_override(tree, override, cls)
    config = config_from_dict(tree, cls, source=path)
    return config, path, [*notes, *check_config(config)]


def config_from_dict(tree: dict[str, Any], cls: type[C], source: str = "config") -> C:
    """Build `cls` from nested dicts; `source` names them in errors.

    Inverse of `config_to_dict`. Raises ConfigError.
    """
    refuse_unknown_keys(tree, cls, source)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(cls), tree)
        missing = next(missing_options(container_of(merged)), None)
        if missing is None:
            built: Any = OmegaConf.to_object(merged)
            return built
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{source}: {error.full_key or 'the file'}: {reason}") from None
    raise ConfigError(f"{source}: {missing} must be given: {help_of(cls, missing)}")


def config_to_dict(config: Any) -> dict[str, Any]:
    """Return nested dicts and lists of JSON types, every option included."""
    return dataclasses.asdict(config)


def without_keys(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the options without API keys, for anything that is stored or sent."""
    return {
        name: without_keys(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if not name.endswith("api_key")
    }


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
        tree = container_of(OmegaConf.load(path)) if Path(path).read_text().strip() else {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} cannot be read: it is not text") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a list; expected options such as 'seed: 1'")
    return tree


def container_of(options: Any) -> Any:
    """Return OmegaConf's `options` as nested dicts and lists, interpolations not yet resolved."""
    return OmegaConf.to_container(options, resolve=False)


def apply_override(tree: dict[str, Any], override: str, cls: type) -> None:
    """Change `tree` by one `a.b=c`, `+a.b=c` or `~a.b`. Raises ConfigError."""
    source = f"override {override!r}"
    key, equals, value = override.removeprefix("+").partition("=")
    delete = override.startswith("~")
    if not delete and (not equals or not key):
        raise ConfigError(f"{source}: expected option=value, +option=value or ~option")
    *parents, leaf = key.removeprefix("~").split(".")
    nested: Any = parsed_value(source, value) if not delete else None
    for part in reversed([*parents, leaf]):
        nested = {part: nested}
    refuse_unknown_keys(nested, cls, source)
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
        node[leaf] = parsed_value(source, value)


def parsed_value(source: str, text: str) -> Any:
    """Parse `text` as YAML, as in a config file: numbers, true, null, [1, 2], {a: 1}.

    Raises ConfigError.
    """
    try:
        return container_of(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{source}: the value is not valid YAML: {' '.join(str(error).split())}") from None


def refuse_unknown_keys(
    tree: dict[str, Any], cls: type, source: str, root: type | None = None, prefix: str = ""
) -> None:
    """Raise ConfigError for an unknown key of `tree`, or for a value in place of a section."""
    root, sections = root or cls, sections_of(cls)
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in sections:
            raise ConfigError(f"{source}: unknown option {name!r}{hint_for(prefix, str(key), cls, root)}")
        nested = sections[key]
        if nested is None or value is None or (isinstance(value, str) and "${" in value):
            continue
        if not isinstance(value, dict):
            raise ConfigError(
                f"{source}: {name} is {value!r}; expected a section with options such as {next(iter(sections_of(nested)))}"
            )
        refuse_unknown_keys(value, nested, source, root, f"{name}.")


def missing_options(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of required options that are missing."""
    for key, value in tree.items():
        if value == REQUIRED:
            yield prefix + key
        elif isinstance(value, dict):
            yield from missing_options(value, f"{prefix}{key}.")


def hint_for(prefix: str, key: str, owner: type, root: type) -> str:
    """Return the end of the message about an unknown key: the likely option, or ""."""
    if key in ELSEWHERE:
        return f"; {ELSEWHERE[key]}"
    nearest = nearest_option(prefix, key, owner, root)
    return f"; did you mean {nearest!r}?" if nearest else ""


def nearest_option(prefix: str, key: str, owner: type, root: type) -> str | None:
    """Return a similarly spelled option of the section, else of any section; None without one."""
    alike = difflib.get_close_matches(key, sections_of(owner), n=1, cutoff=0.7)
    if alike:
        return prefix + alike[0]
    names = {name.rpartition(".")[2]: name for name in reversed(list(all_options(root)))}
    alike = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
    return names[alike[0]] if alike else None


def all_options(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all options, outer ones first."""
    sections = sections_of(cls)
    yield from (prefix + key for key in sections)
    for key, nested in sections.items():
        if nested is not None:
            yield from all_options(nested, f"{prefix}{key}.")


def sections_of(cls: type) -> dict[str, type | None]:
    """Return the dataclass of each field, None where the field is a plain value."""
    hints = typing.get_type_hints(cls)
    return {field.name: dataclass_in(hints[field.name]) for field in dataclasses.fields(cls)}


def dataclass_in(annotation: Any) -> type | None:
    """Return the dataclass in `X` or `X | None`; None without one."""
    members = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((m for m in members if isinstance(m, type) and dataclasses.is_dataclass(m)), None)


def help_of(cls: type, option: str) -> str:
    """Return the help text of a dotted option."""
    first, _, rest = option.partition(".")
    nested = sections_of(cls)[first]
    if rest and nested is not None:
        return help_of(nested, rest)
    metadata = next(field.metadata for field in dataclasses.fields(cls) if field.name == first)
    return metadata["help"] if metadata else "an option of your own"
