"""Names of options: all of a config class, and the refusal of unknown ones with what was meant."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator
from typing import Any

from areal_core.config.option import REQUIRED
from areal_core.errors import ConfigError

# Options that scripts of upstream declare in config classes of their own.
OF_SCRIPTS = ("workflow", "eval_workflow", "reward_fn_path", "max_turns", "tir", "export_style")
ELSEWHERE = {  # options of upstream that were removed, or are not supported here
    "model": "it is called 'actor'",
    "behave_imp_weight_cap": "use rejection_sampling.upper",
    "behave_imp_weight_mode": "use rejection_sampling.level and rejection_sampling.action",
    "server_only": "an allocation such as 'sglang:d4' starts servers only",
    "ulysses_sp_size": "it is the c of the allocation, as in 'fsdp:d2c2'",
    "megatron": "there is no Megatron engine; remove the section, whose use_deterministic_algorithms is deterministic=true here",
    "archon": "there is no Archon engine; remove the section",
}


def refuse_unknown_keys(tree: dict[str, Any], cls: type, source: str) -> None:
    """Raise ConfigError for all unknown keys of `tree`, and values in place of a section."""
    if problems := list(unknown_keys(tree, cls, source)):
        raise ConfigError("\n".join(problems))


def unknown_keys(
    tree: dict[str, Any], cls: type, source: str, root: type | None = None, prefix: str = ""
) -> Iterator[str]:
    root, sections = root or cls, sections_of(cls)
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in sections:
            yield f"{source}: unknown option {name!r}{hint_for(prefix, str(key), value, cls, root)}"
            continue
        nested = sections[key]
        if nested is None or value is None or (isinstance(value, str) and "${" in value):
            continue
        if not isinstance(value, dict):
            such = f"expected a section with options such as {next(iter(sections_of(nested)))}"
            yield f"{source}: {name} is {value!r}; {such}"
        else:
            yield from unknown_keys(value, nested, source, root, f"{name}.")


def missing_options(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if value == REQUIRED:
            yield prefix + key
        elif isinstance(value, dict):
            yield from missing_options(value, f"{prefix}{key}.")


def hint_for(prefix: str, key: str, value: Any, owner: type, root: type) -> str:
    """Return the end of the message about an unknown key: the likely option, or ""."""
    if key in ELSEWHERE:
        return f"; {ELSEWHERE[key]}"
    nearest = nearest_option(prefix, key, owner, root)
    if prefix or (nearest and key not in OF_SCRIPTS):
        return f"; did you mean {nearest!r}?" if nearest else ""
    return f"; if it is an option of your script, declare it in the script and load {own_class(key, value, root)}"


def own_class(key: str, value: Any, root: type) -> str:
    is_plain = isinstance(value, bool | int | float | str)
    field = f"{key}: {type(value).__name__} = {value!r}" if is_plain else f"{key}: Any = None"
    return f"MyConfig:\n    @dataclass\n    class MyConfig({root.__name__}):\n        {field}"


def nearest_option(prefix: str, key: str, owner: type, root: type) -> str | None:
    """Return a similarly spelled option of the section, else of any section; None without one."""
    alike = difflib.get_close_matches(key, sections_of(owner), n=1, cutoff=0.7)
    if alike:
        return prefix + alike[0]
    names = {name.rpartition(".")[2]: name for name in reversed(list(all_options(root)))}
    alike = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
    return names[alike[0]] if alike else None


def all_options(cls: type, prefix: str = "") -> Iterator[str]:
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
    first, _, rest = option.partition(".")
    nested = sections_of(cls)[first]
    if rest and nested is not None:
        return help_of(nested, rest)
    metadata = next(field.metadata for field in dataclasses.fields(cls) if field.name == first)
    return metadata["help"] if metadata else "an option of your own"
