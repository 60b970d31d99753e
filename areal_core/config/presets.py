"""Algorithms by name: each preset expands to plain options, and to nothing else.

Precedence follows from where a preset is given. In a file, the other options of the file override
`algorithm: dapo`. On the command line, `algorithm=dapo` overrides the file, and the other overrides
override it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from areal_core.errors import ConfigError

Options = dict[str, Any]  # dotted name -> value


TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PRESETS: dict[str, Options] = TABLES["presets"]
RESET: Options = TABLES["reset"]
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
    return option in present and present[option] == value


def shown(value: Any) -> str:
    """Return the value as YAML spells it."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
