"""Print options, two or more lines each, wrapped to the terminal."""

import textwrap
from collections.abc import Sequence

from rich.console import Console

from areal_debug.config.options import OptionFacts
from areal_debug.render import styled

NARROWEST, WIDEST = 40, 80
INDENT = "    "


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
