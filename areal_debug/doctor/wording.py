"""Name options in advice as the user's trainer does."""

import re
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

from areal_debug.doctor.alarm import Alarm

OWN = "AReaL"  # whose names the advice is written in


@cache
def options() -> dict[str, dict[str, str]]:
    """Return the rows of `options.toml` by the name in AReaL; families in small letters."""
    rows = tomllib.loads((Path(__file__).parent / "options.toml").read_text(encoding="utf-8"))
    return {name: {family.lower(): own for family, own in row.items()} for name, row in rows.items()}


@cache
def pattern() -> re.Pattern[str]:
    """Return what finds an option, with a value, and with the brackets around it."""
    names = "|".join(re.escape(name) for name in sorted(options(), key=len, reverse=True))
    return re.compile(rf"(?P<open> \()?(?P<name>{names})\b(?P<value>=\S*\w)?(?P<rest>[^()]*\))?")


def in_words_of(family: str, alarm: Alarm) -> Alarm:
    """Return an alarm that names options as a family does, without changes of our config."""
    if family == OWN:
        return alarm
    return replace(
        alarm,
        advice=tuple(renamed(family, text) for text in alarm.advice),
        experiment=renamed(family, alarm.experiment),
        overrides={},
    )


def renamed(family: str, text: str) -> str:
    """Return a text with the options' names in a family, or in words where it has none."""

    def name_of(match: re.Match[str]) -> str:
        row, in_brackets = options()[match["name"]], match["open"] and match["rest"]
        value, rest = match["value"] or "", match["rest"] or ""
        if family.lower() in row:
            return (match["open"] or "") + row[family.lower()] + value + rest
        if in_brackets:
            return ""
        return (match["open"] or "") + row["words"] + value.replace("=", " ") + rest

    return pattern().sub(name_of, text)
