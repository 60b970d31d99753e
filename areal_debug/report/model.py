"""A report: a verdict in one line, findings, and blocks of facts. Analysis makes none of it.

    result of a tool -> its `report_of` -> Report -> terminal.py | page.py
                     -> its `document`  -> JSON, the same facts

A tool says each sentence once, in its `report_of`; a terminal and a page show the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Level = Literal["good", "bad", "unsure", "dim", ""]  # what a colour says
# What a verdict says by its first word; any other is neutral.
TONES: dict[Level, set[str]] = {
    "good": {
        *("healthy", "identical", "passed", "verified", "not hung", "equal", "agree", "complete"),
        *("continues", "conforms", "proven", "sound"),
    },
    "bad": {
        *("problem", "error", "mismatch", "diverged", "hung", "damaged", "failed", "slow", "differs"),
        *("incomplete", "changed", "fails", "refuted"),
    },
    "unsure": {
        *("unknown", "warning", "inconclusive", "other", "not comparable", "unfinished", "not checked"),
        *("same weights, other numbers", "undecided"),
    },
}


def tone_of(verdict: str) -> Level:
    """Return what a verdict says: `good`, `bad`, `unsure`, or "" for another text."""
    return next((tone for tone, words in TONES.items() if verdict.lower() in words), "")


class Row(NamedTuple):
    """A labelled line; a row without a label continues the one before.

    `address` is where a page links to, `is_code` a command.
    """

    label: str
    text: str
    level: Level = ""
    address: str = ""
    is_code: bool = False


class Cell(NamedTuple):
    """A cell of a table that has a colour or a link."""

    text: str
    level: Level = ""
    address: str = ""


@dataclass(frozen=True)
class Facts:
    """Labelled lines below a title; `anchor` is the title's place in a page."""

    rows: Sequence[Row]
    title: str = ""
    anchor: str = ""


@dataclass(frozen=True)
class Table:
    """Rows below headings; a heading that ends with `>` aligns its column to the right.

    `more` follows the rows, such as a count of those left out. `only` is where it is shown.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    more: str = ""
    only: Literal["", "page", "terminal"] = ""


@dataclass(frozen=True)
class Curve:
    """Values over steps. A terminal draws one line, a page a chart with the marked steps as dots.

    `caption` is what a page says below it, `ends` what a terminal says after it.
    """

    label: str
    values: Sequence[float]
    steps: Sequence[int] = ()
    marked: frozenset[int] = frozenset()
    caption: str = ""
    ends: str = ""


@dataclass(frozen=True)
class Picture:
    """A chart that only a page shows: SVG of ours."""

    svg: str
    caption: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Finding:
    """One thing that was found: what it is, what holds it up, what to do, what would refute it.

    `note` follows the title, such as a confidence; `rows` are in the order in which to read them.
    """

    id: str
    title: str
    level: Level
    rows: Sequence[Row]
    note: str = ""
    curve: Curve | None = None


@dataclass(frozen=True)
class Styled:
    """Text with styles of rich that only a terminal shows: a map of ranks, tokens in colours."""

    text: Any


Block = Facts | Table | Curve | Picture | Finding | Styled | str


@dataclass(frozen=True)
class Report:
    """What a verb says.

    Args:
        verdict: the word or words before the colon of the first line.
        sentence: the rest of the first line.
        level: what the verdict means.
        notes: lines below it: what was read, what is unknown.
    """

    verdict: str
    sentence: str
    level: Level
    blocks: Sequence[Block] = ()
    notes: Sequence[str] = field(default=())

    @property
    def exit_code(self) -> int:
        """Of a verb that judges: 0 healthy, 1 a problem was found, 2 inconclusive."""
        return {"bad": 1, "unsure": 2}.get(self.level, 0)


def rows_of(label: str, texts: Sequence[str], level: Level = "") -> list[Row]:
    return [Row("" if i else label, text, level) for i, text in enumerate(texts)]
