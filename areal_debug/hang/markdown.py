"""A diagnosis as Markdown for an issue tracker: verdict, culprits, evidence, next steps,
refutation.
"""

import re

from areal_core.safety.printable import printable
from areal_debug.hang.tree import Line, headline, merged_tree, sections, tree_lines
from hangdoctor.graph import rank_ranges
from hangdoctor.model import Diagnosis

# Words that an issue tracker links, or notifies somebody for, even where `@` or `#` is escaped.
LINKED = re.compile(r"(\S*(?:@|://|www\.|#\d)\S*)", re.IGNORECASE)


def markdown(diagnosis: Diagnosis) -> str:
    """Return the complete report; text from dumps is escaped so that it cannot become markup."""
    parts = [
        f"## {headline(diagnosis)} ({diagnosis.confidence} confidence)",
        plain(diagnosis.summary),
        f"Culprits: {plain(rank_ranges(diagnosis.culprit_ranks) or 'none')}. "
        f"Victims: {plain(rank_ranges(diagnosis.victim_ranks) or 'none')}.",
        tree(diagnosis),
        *(section(title, lines) for title, lines in sections(diagnosis)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def section(title: str, lines: list[Line]) -> str:
    """Return a heading with a list, or an empty string for no lines."""
    return "\n".join([f"### {title}", "", *(f"- {item(line)}" for line in lines)]) if lines else ""


def item(line: Line) -> str:
    head = f"`{code(line.head)}`: " if line.is_code else f"**{plain(line.head)}** " if line.head else ""
    return head + plain(line.text) + (f" at `{code(line.where)}`" if line.where else "")


def tree(diagnosis: Diagnosis) -> str:
    """Return the merged stacks as a code block."""
    lines = tree_lines(merged_tree(diagnosis.groups))[:200]
    shown = [
        f"{'  ' * line.indent}{'* ' if line.fork else ''}{printable(line.text)}{f'  [{printable(line.ranks)}]' if line.ranks else ''}"
        for line in lines
    ]
    body = "\n".join(shown).replace("```", "'''")
    return f"### Stacks\n\n```\n{body}\n```" if shown else ""


def plain(text: str) -> str:
    """Escape Markdown in text from dumps: one paragraph without markup, links or mentions."""
    words = LINKED.split(printable(text).strip())  # every second one would be linked
    shown = "".join(f"`{code(word)}`" if place % 2 else escaped(word) for place, word in enumerate(words))
    return re.sub(r"^(\d*)(?=[-+=.)])", r"\1\\", shown)  # a list, a number or an underline


def escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|~@&$!])", r"\\\1", text)


def code(text: str) -> str:
    """Make text from dumps safe inside backticks."""
    return printable(text).replace("`", "'")
