"""The options of a method as data: name, type, default, choices or limits, and help."""

import dataclasses
import difflib
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from areal_core.config.derived import FOLLOWS
from areal_core.config.experiment import METHODS
from areal_core.config.names import dataclass_in
from areal_core.config.option import REQUIRED
from areal_core.config.presets import shown
from areal_debug.render import styled

KINDS = {"grpo": METHODS["ppo"]} | METHODS
NARROWEST, WIDEST = 40, 80  # columns
INDENT = "    "

# Defaults of options that follow from others.
DERIVED = {option: f"as {other}" for option, other in FOLLOWS.items()} | {
    "experiment_name": "the file's name",
    "trial_name": "trial0",
}


@dataclass(frozen=True)
class OptionFacts:
    """One option, or a section of options, whose default is "section" or "null".

    Args:
        default: as YAML spells it, or in words if it follows from another option; "required"
            without one.
        allowed: the choices or limits in words; "" for any value of the type.
    """

    name: str
    type: str
    default: str
    allowed: str
    help: str
    is_section: bool = False


def options_of(cls: type, prefix: str = "") -> Iterator[OptionFacts]:
    """Yield all options of a config class, each section before the options in it."""
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    nested = {field.name: dataclass_in(hints[field.name]) for field in fields}
    for field in sorted(fields, key=lambda field: nested[field.name] is not None):
        section = nested[field.name]
        if field.name.startswith("_"):  # of upstream's own workers
            continue
        yield facts_of(field, hints[field.name], prefix, section is not None)
        if section is not None:
            yield from options_of(section, f"{prefix}{field.name}.")


def facts_of(field: "dataclasses.Field[Any]", annotation: Any, prefix: str, is_section: bool) -> OptionFacts:
    """Describe one field of a config class."""
    choices, limits = field.metadata["choices"], field.metadata["limits"]
    allowed = ", ".join(shown(choice) for choice in choices) if choices else limits.words if limits else ""
    default = field.default if field.default is not dataclasses.MISSING else None
    if default is None and field.default_factory is not dataclasses.MISSING:
        default = "section" if is_section else field.default_factory()
    name = prefix + field.name
    text = "required" if default == REQUIRED else '""' if default == "" else shown(default)
    return OptionFacts(
        name, type_name(annotation), DERIVED.get(name, text), allowed, field.metadata["help"], is_section
    )


def type_name(annotation: Any) -> str:
    """Return a type as written in Python, without modules: `int | None`, `list[str]`."""
    if isinstance(annotation, types.UnionType):
        return " | ".join(type_name(member) for member in typing.get_args(annotation))
    if annotation is type(None):
        return "None"
    return annotation.__name__ if type(annotation) is type else str(annotation).replace("typing.", "")


def select(options: list[OptionFacts], search: str) -> list[OptionFacts]:
    """Return a section's options, or else those whose name or help contains the words.

    Raises:
        ValueError: there is none; with similar names.
    """
    wanted = search.lower()
    within = [one for one in options if f"{one.name}.".startswith(f"{wanted}.")]
    words = {wanted, wanted.replace("_", " ")}
    found = within or [one for one in options if any(w in f"{one.name} {one.help}".lower() for w in words)]
    if found:
        return found
    names = [one.name.rpartition(".")[2] for one in options]
    alike = difflib.get_close_matches(wanted.rpartition(".")[2], names)
    hint = f"; similar: {', '.join(dict.fromkeys(alike))}" if alike else ""
    raise ValueError(f"no option has {search!r} in its name or help{hint}")


def print_options(out: Console, options: Sequence[OptionFacts]) -> None:
    """Print each option: name, type, default and limits, then its help."""
    width = max(min(out.width, WIDEST), NARROWEST)
    for option in options:
        for line in wrapped(facts_line(option), width, INDENT * 2):
            name, rest = line[: len(option.name)], line[len(option.name) :]
            is_first = name == option.name
            out.print(
                styled("[bold]{}[/bold]{}", name, rest) if is_first else styled("{}", line), soft_wrap=True
            )
        for line in wrapped(INDENT + option.help, width, INDENT):
            out.print(styled("[dim]{}[/dim]", line), soft_wrap=True)


def facts_line(option: OptionFacts) -> str:
    """Return `actor.eps_clip: float = 0.2 (0 or more)`; of a section `actor: PPOActorConfig`."""
    default = "" if option.default == "section" else f" = {option.default}"
    allowed = f" ({option.allowed})" if option.allowed else ""
    return f"{option.name}: {option.type}{default}{allowed}"


def wrapped(text: str, width: int, indent: str) -> list[str]:
    """Wrap text to lines of at most `width`, the second and later ones indented."""
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
