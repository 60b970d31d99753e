"""Which checks passed, failed, or had nothing to judge: no run is healthy because nobody looked."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from areal_debug.doctor.alarm import findings
from areal_debug.doctor.names import nearest_quantity
from areal_debug.doctor.read import OF_PREFERENCES, Run
from areal_debug.doctor.rules.drift import by_position
from areal_debug.doctor.rules.learning import is_high
from areal_debug.doctor.rules.rewards import TERM, terms_of
from areal_debug.doctor.rules.terms import configured
from areal_debug.doctor.samples.ends import end_tokens, tokens_named
from areal_debug.doctor.samples.read import Rows
from areal_debug.doctor.series import FEWEST_STEPS

LEAST = 20, 40  # steps that some checks need
ENOUGH = 1 / 3  # of the checks of this kind of run must have had data


@dataclass(frozen=True)
class Checks:
    """Ids of findings by the state of their check.

    `unobserved` has what each check needs; a missing alternative is one text with `|`.
    """

    passed: tuple[str, ...]
    failed: tuple[str, ...]
    unobserved: dict[str, tuple[str, ...]]

    @property
    def num_tried(self) -> int:
        return len(self.passed) + len(self.failed)

    @property
    def num_all(self) -> int:
        return self.num_tried + len(self.unobserved)

    @property
    def are_few(self) -> bool:
        return self.num_tried < ENOUGH * self.num_all

    def lacks(self, kind: str) -> str:
        """Return the reward or loss that does not show its trend, "" if it does.

        "whole": it does not change in steps long after its start; "20": it has fewer steps.
        """
        needs = (need.split() for id in ("D01", "D06") for need in self.unobserved.get(id, ()))
        return next((quantity for found, quantity in needs if found == kind), "")


def checks_of(run: Run, rows: Rows | None, failed: Collection[str]) -> Checks:
    """Return the state of every check that this kind of run has. `failed` are ids of alarms."""
    observed, kind = observed_in(run, rows), run.kind
    passed, unobserved = [], {}
    for id, row in findings().items():
        if not applies(id, row.get("of", "learning"), kind, run) or id in failed:
            continue
        missing = tuple(need for need in row["needs"] if observed.isdisjoint(need.split("|")))
        if missing:
            unobserved[id] = missing
        else:
            passed.append(id)
    return Checks(tuple(passed), tuple(failed), unobserved)


def applies(id: str, of: str, kind: str, run: Run) -> bool:
    """Return whether a check is about this kind of run; checks of samples are about records."""
    if id.startswith("S"):
        return run.record is not None
    return of in ("any", kind) or (kind == "preferences" and of == "supervised")


def observed_in(run: Run, rows: Rows | None) -> set[str]:
    """Return quantities with enough values, those not rounded, and what a record's rows have."""
    enough = {name: one for name, one in run.series.items() if len(one.finite.values) >= FEWEST_STEPS}
    found = {*enough, *(f"exact {name}" for name, one in enough.items() if one.resolution == 0)}
    found |= {
        f"whole {name}"
        for name, one in enough.items()
        if not one.finite.is_late_level or (name == "reward" and is_high(one.finite))
    }
    found |= {f"{least} {name}" for name, one in enough.items() for least in LEAST if len(one.steps) >= least}
    found |= {name for name in ("eval_reward", "eval_loss", "failed", "accepted") if name in run.series}
    if configured(run):
        found.add("weighted_terms")
    if any("version" in name for name in run.by_name):
        found.add("versions")
    if len(terms_of(run)) > 0:
        found.add("reward_terms")
    if by_position(run):
        found.add("kl_by_position")
    if rows is None:
        return found
    of_rows = {
        "samples": len(rows) > 0,
        "text": rows.has_text,
        "end_tokens": bool(end_tokens(rows.record)) and bool(rows.stopped.any()),
        "begin_tokens": bool(tokens_named(rows.record, "bos_token_id")),
        "rewards": bool(np.isfinite(rows.reward).any()),
        "advantages": bool(np.isfinite(rows.advantage).any()),
        "reference": bool(np.isfinite(rows.apart).any()),
        "trainer_logprobs": bool(np.isfinite(rows.difference).any()),
    }
    return found | {name for name, is_there in of_rows.items() if is_there}


def unread(run: Run) -> dict[str, str]:
    """Return columns that look like a quantity which no other column gave, and the quantity."""
    nearest = {name: nearest_quantity(name) for name in run.unknown_names if not TERM.match(name)}
    known = {*run.series, "", *(OF_PREFERENCES if run.kind != "preferences" else ())}
    return {name: quantity for name, quantity in nearest.items() if quantity not in known}
