"""One option is one dataclass field: its default, its help text and, where the values are few, its choices."""

from collections.abc import Callable
from dataclasses import field
from typing import Any

REQUIRED = "???"  # what OmegaConf takes for a value that the user must give


def option(default: Any, help: str, choices: tuple[Any, ...] = ()) -> Any:
    """A field with a plain default. `choices`, if any, are the only values that `check_config` lets pass."""
    return field(default=default, metadata={"help": help, "choices": choices})


def section(factory: Callable[[], Any], help: str) -> Any:
    """A field whose default is a fresh object: a nested section, a list or a dict."""
    return field(default_factory=factory, metadata={"help": help, "choices": ()})
