"""Name options in advice as the user's trainer does, and the record that was read."""

import re
import shlex
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

from areal_debug.doctor.alarm import Alarm
from recorder import Record

OWN = "AReaL"  # whose names the advice is written in
NUMBERED = re.compile(r"\bstep(?=s? \d)|(?<=\d )step(?=s?\b)")  # `step 3`, `3 steps`
ON_RECORD = re.compile(r"(?:^|:? )areal-debug (\w+) (?:\w+ )?RECORD\b.*")


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


def in_words_of(family: str, alarm: Alarm, record: Record | None = None, unit: str = "step") -> Alarm:
    """Return an alarm that names options as a family does, without changes of our config.

    Steps that are counted rows (`unit`) are named so. Commands name the record that was read; they
    are left out without one, or if they refuse it.
    """

    def of_record(text: str) -> str:
        text = NUMBERED.sub(unit, text)
        if (match := ON_RECORD.search(text)) is None:
            return text
        is_refused = record is not None and record.header.trainer and match[1] in ("replay", "goto")
        if record is None or is_refused:
            return text[: match.start()]
        return text.replace("RECORD", shlex.quote(str(record.path)))

    advice = tuple(filter(None, map(of_record, alarm.advice)))
    title, found, cost, experiment = map(of_record, (alarm.title, alarm.found, alarm.cost, alarm.experiment))
    alarm = replace(alarm, advice=advice, title=title, found=found, cost=cost, experiment=experiment)
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
