"""A diagnosis as Markdown for an issue tracker: verdict, culprits, evidence, next steps,
refutation.
"""

import re

from areal_core.safety.printable import printable
from hangdoctor.graph import rank_ranges
from hangdoctor.model import Diagnosis
from hangdoctor.report.text import headline, merged_tree, tree_lines

# Words that an issue tracker links, or notifies somebody for, even where `@` or `#` is escaped.
LINKED = re.compile(r"(\S*(?:@|://|www\.|#\d)\S*)", re.IGNORECASE)


def markdown(diagnosis: Diagnosis) -> str:
    """Return the complete report; text from dumps is escaped so that it cannot become markup."""
    parts = [
        f"## {headline(diagnosis)} ({diagnosis.confidence} confidence)",
        plain(diagnosis.summary),
        who(diagnosis),
        section(
            "Evidence", [evidence_line(e.ranks, e.fact, e.process, e.location) for e in diagnosis.evidence]
        ),
        tree(diagnosis),
        section(
            "Next",
            [
                f"`{code(s.do)}`: {plain(s.why)}{f' (cost: {plain(s.cost)})' if s.cost else ''}"
                for s in diagnosis.next_steps
            ],
        ),
        section("Would refute it", [plain(line) for line in diagnosis.would_refute]),
        section(
            "Other readings",
            [f"{a.label} ({a.confidence}): {plain(a.summary)}" for a in diagnosis.alternatives],
        ),
        section("To collect", [plain(line) for line in diagnosis.collect]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def who(diagnosis: Diagnosis) -> str:
    """Return the line of culprits and victims."""
    culprits = rank_ranges(diagnosis.culprit_ranks) or "none"
    return f"Culprits: {plain(culprits)}. Victims: {plain(rank_ranges(diagnosis.victim_ranks) or 'none')}."


def section(title: str, lines: list[str]) -> str:
    """Return a heading with a list, or an empty string for no lines."""
    return "\n".join([f"### {title}", "", *(f"- {line}" for line in lines)]) if lines else ""


def evidence_line(ranks: str, fact: str, process: str, location: str) -> str:
    subject = f"**{plain(ranks or process)}** " if ranks or process else ""
    return f"{subject}{plain(fact)}" + (f" at `{code(location)}`" if location else "")


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
