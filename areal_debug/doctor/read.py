"""Read the metrics of one run, whatever it was logged with and under which names."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from areal_debug.doctor.names import QUANTITIES, choose_names, family_of
from areal_debug.doctor.rows import is_record, metrics_of
from areal_debug.doctor.series import NOTHING, Series
from areal_debug.doctor.sources.locate import RECORD, find_source
from areal_debug.doctor.sources.plain_files import (
    UnreadableRun,
    fault_of_csv,
    parse_json,
    read_csv,
    read_jsonl,
    read_text,
)
from areal_debug.doctor.sources.to_series import STEP_NAMES, collect
from areal_debug.waiting import doing
from recorder import Record, open_record
from recorder.reader import Damage

OF_PREFERENCES = ("preference_accuracy", "chosen_reward", "rejected_reward")
OF_REWARDS = ("reference_kl", "approx_kl", "clip_ratio", "zero_variance_groups", "length", "reward")
OF_ANY_RECORD = "record/length"  # counted from rows, also from supervised ones
OF_PAIRS = re.compile(r"(?i)chosen|reject|margin|accuracies|prefer|pair|\bdist\b|^(?:dpo|rw)/")
OF_ACCURACY, OF_GUESSES = re.compile(r"(?i)acc(?:uracy)?$"), 0.08  # nats from ln 2
OF_TEACHER = re.compile(r"(?i)(?<![a-z])(?:teacher|distill)")
OF_CONSISTENCY = ("mean_abs", "k3", "share_above_ln2")  # numbers of a check
COUNTS = {"id", "epoch", "timestamp"}  # beside the step: of the logger, and no metrics


@dataclass(frozen=True)
class Run:
    """The metrics of one run.

    `series` are by quantity (`names.py`), `by_name` is everything that was logged, `config` are
    dotted options of AReaL (empty where unknown). `other_runs` are the names of the runs at the
    same path that were not read, `unknown_names` the metrics that are no known quantity. `notes`
    say which values of a record are unknown.
    """

    path: str
    source: str
    family: str
    series: dict[str, Series]
    by_name: dict[str, Series]
    config: dict[str, Any]
    other_runs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    record: Record | None = None  # that the metrics were read from
    damage: Damage = field(default_factory=Damage)  # what of the record was left out
    unknown_names: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        """Steps of the longest metric."""
        return max((len(series.steps) for series in self.by_name.values()), default=0)

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last step that any metric has."""
        ends = [int(series.steps[at]) for series in self.by_name.values() for at in (0, -1)]
        return min(ends), max(ends)

    @property
    def unit(self) -> str:
        """What `steps` are: "step", or "row" where the source names none."""
        return next((series.unit for series in self.by_name.values()), "step")

    @property
    def kind(self) -> str:
        """By what is logged: "learning" (by reward), "supervised" or "preferences" (pairs)."""
        named = {quantity for quantity, series in self.series.items() if series.name != OF_ANY_RECORD}
        if not named.isdisjoint(OF_PREFERENCES):
            return "preferences"
        return "supervised" if "loss" in named and named.isdisjoint(OF_REWARDS) else "learning"

    def finite(self, quantity: str) -> Series:
        """Return a quantity without NaN and infinities; an empty series if it is not logged."""
        return self.series[quantity].finite if quantity in self.series else NOTHING


def read_run(path: Path, name: str | None = None, given: Mapping[str, str] | None = None) -> Run:
    """Read the metrics of the only run at a path: a record, a file, or a folder.

    Args:
        name: of the run, where there are several.
        given: names of metrics by quantity, for quantities that are not found by themselves.

    Raises:
        UnreadableRun: there are none, several, or fewer than one step, or a given name is unknown.
    """
    if is_record(path):
        return read_record(path, given)
    source, other_runs = find_source(path, name)
    if source.format is RECORD:
        return read_record(source.file, given)
    file = source.file
    rows = source.format.read(file, source.run)
    consistency = file.parent / "consistency.jsonl"
    if file.name == "stats.jsonl" and consistency.is_file():
        names = {"step": "step"} | {name: f"consistency/{name}" for name in OF_CONSISTENCY}
        checked = (row for row in read_jsonl(consistency) if isinstance(row, dict) and "step" in row)
        rows = chain(rows, ({names[key]: row[key] for key in names if key in row} for row in checked))
    by_name = collect(rows)
    if not by_name:
        raise UnreadableRun(
            fault_of_csv(file)
            if source.format.read is read_csv
            else f"{file} contains no numbers by step: give a file with a column {' or '.join(STEP_NAMES)}"
        )
    series = judged(by_name, given)
    return Run(
        str(path),
        f"{file}, run {source.run}" if source.run else str(file),
        family_of(list(by_name)),
        series,
        by_name,
        read_config(file),
        other_runs,
        unknown_names=unknown(by_name, series),
    )


def read_record(path: Path, given: Mapping[str, str] | None = None) -> Run:
    """Read the metrics of a record. Raises RecordError, and UnreadableRun for one without steps."""
    damage = Damage()
    record = open_record(path, damage)
    with doing(f"reading the metrics of {path}", len(record.steps)):
        rows, notes = metrics_of(record, damage)
    record = replace(record, steps=tuple(row["step"] for row in rows))  # the intact ones
    by_name, trainer = collect(rows), record.header.trainer
    if not by_name:
        raise next(
            iter(damage.found.values()),
            UnreadableRun(f"{path} holds no committed step: nothing to judge"),
        )
    config = dict(flat(record.header.config)) if trainer is None else {}
    family = trainer or family_of(list(by_name))
    series = judged(by_name, given)
    return Run(
        *(str(path), str(path), family, series, by_name, config),
        notes=notes,
        record=record,
        damage=damage,
        unknown_names=unknown(by_name, series),
    )


def judged(by_name: Mapping[str, Series], given: Mapping[str, str] | None = None) -> dict[str, Series]:
    """Return the series of each quantity that the run logs, by the given names before others.

    Raises UnreadableRun for a given quantity or name that is not known.
    """
    for quantity, name in (given or {}).items():
        if quantity not in QUANTITIES:
            raise UnreadableRun(f"{quantity!r} is no quantity: expected one of {', '.join(QUANTITIES)}")
        if name.removeprefix("train/") not in by_name:
            raise UnreadableRun(f"the run logs no {name!r}: it logs {', '.join(list(by_name)[:20])}")
    chosen = choose_names(list(by_name)) | {
        quantity: name.removeprefix("train/") for quantity, name in (given or {}).items()
    }
    series = {quantity: by_name[chosen[quantity]] for quantity in QUANTITIES if quantity in chosen}
    loss, held_out = (series.get(name, NOTHING).finite for name in ("loss", "eval_reward"))
    of_two = len(loss.values) and abs(np.median(loss.values[:3]) - np.log(2)) < OF_GUESSES
    if of_two and "reward" not in series and OF_ACCURACY.search(held_out.name):
        series["preference_accuracy"] = series.pop("eval_reward")  # the loss of one of two begins at ln 2
    elif not any(map(OF_PAIRS.search, by_name)) and "preference_accuracy" not in (given or {}):
        series.pop("preference_accuracy", None)  # of tokens, or of answers
    elif not any(name in series for name in (*OF_REWARDS[:-1], *(given or {}))):
        series.pop("reward", None)  # the mean score of pairs: its level means nothing
    if any(map(OF_TEACHER.search, by_name)) and not series.get("reward", NOTHING).values.any():
        series.pop("reward", None)  # 0 in each step: a teacher is distilled
    turns = series.get("tool_calls", NOTHING)
    if "turn" in turns.name and len(turns.finite.values):  # one or two of them are an answer without a call
        series["tool_calls"] = replace(
            turns, values=turns.values - min(2.0, np.floor(turns.finite.values.min()))
        )
    entropy = series.get("entropy", NOTHING)
    if re.search("(?i)ent[a-z_]* ?loss", entropy.name) and entropy.finite.first <= 0:
        series["entropy"] = entropy = replace(entropy, values=-entropy.values)  # of a loss: negative
    if min(entropy.finite.first, entropy.finite.last) < 0:
        del series["entropy"]  # of a density (continuous actions): its level and ratios mean nothing
    return series


def unknown(by_name: Mapping[str, Series], series: Mapping[str, Series]) -> tuple[str, ...]:
    """Return the names of the metrics that no rule reads."""
    read = {one.name for one in series.values()}
    return tuple(name for name in by_name if name not in read | COUNTS and not name.startswith("_"))


def read_config(file: Path) -> dict[str, Any]:
    """Read the dotted options of the run from a config or a record next to the metrics."""
    for name in ("config.json", "record/record.json"):
        found = file.parent / name
        if found.is_file():
            document = parse_json(read_text(found), str(found))
            options = document.get("config") if name.startswith("record") else document
            return dict(flat(options)) if isinstance(options, dict) else {}
    return {}


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield dotted names and values."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
