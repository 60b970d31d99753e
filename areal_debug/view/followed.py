"""A record that may be growing, as the page shows it: curve values and steps are read once."""

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from areal_debug.view.conversations import calls_document
from areal_debug.view.data import (
    MAX_CURVE_STEPS,
    RunView,
    StepView,
    curves_of,
    read_run,
    read_step,
    redacted_run,
    step_point,
)
from areal_debug.view.images import image_document
from areal_debug.view.text import Decode
from recorder import Record, RecordedStep, open_record

KEPT_STEPS = 4
SHORT, KEPT_TEXTS = 2, 1 << 20  # most texts are those of one token, decoded after another one


class FollowedRecord:
    """A record that may be growing.

    Args:
        path: path of the record.
        decode: decodes token ids, or None.
        patterns: what to redact.
        tick: called for each step whose curve values were read.
    """

    def __init__(
        self,
        path: str,
        decode: Decode | None,
        patterns: Sequence[re.Pattern[str]],
        tick: Callable[[object], None] = lambda _: None,
    ) -> None:
        self._path, self._decode, self._patterns = path, decode and kept(decode), patterns
        self._record: Record = open_record(path)
        self._run = redacted_run(read_run(self._record, tick), patterns)
        self._points = {step: point_at(self._run, place) for place, step in enumerate(self._run.steps)}
        self._views: OrderedDict[int, StepView] = OrderedDict()

    @property
    def is_foreign(self) -> bool:
        """Return whether another trainer recorded it."""
        return self._record.header.trainer is not None

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the steps that were committed when it was last read."""
        return self._record.steps

    def run(self) -> RunView:
        """Return the run with the steps recorded so far."""
        self._record = open_record(self._path)
        new = [step for step in self.steps if step > max(self._points, default=-1)]
        for step in new:
            self._points[step] = step_point(self._record.step(step), lambda _: None)
        steps = list(self._points)[-MAX_CURVE_STEPS:]
        curves = curves_of([self._points[step] for step in steps])
        run = replace(self._run, steps=steps, curves=curves, num_steps=len(self.steps))
        self._run = redacted_run(run, self._patterns)
        return self._run

    def step(self, step: int) -> RecordedStep:
        """Return a committed step. Raises `RecordError`."""
        if step not in self.steps:
            self._record = open_record(self._path)
        return self._record.step(step)

    def images(self, step: int) -> dict[str, Any]:
        """Return the pictures of a step, which no pattern can be matched with: all are redacted.

        Raises `RecordError`.
        """
        return image_document(self.step(step), hidden=bool(self._patterns))

    def calls(self, step: int) -> dict[str, Any]:
        """Return the calls of agents in a step, redacted. Raises `RecordError`."""
        return calls_document(self.step(step), self._patterns)

    def view(self, step: int) -> StepView:
        """Return a step as columns; the last few are kept. Raises `RecordError`."""
        if step not in self._views:
            trainer = self._record.header.trainer
            self._views[step] = read_step(self.step(step), self._decode, self._patterns, trainer)
            if len(self._views) > KEPT_STEPS:
                self._views.popitem(last=False)
        self._views.move_to_end(step)
        return self._views[step]


def kept(decode: Decode) -> Decode:
    """Return the decoder with the texts of short lists kept: those of all steps repeat."""
    short = lru_cache(maxsize=KEPT_TEXTS)(lambda ids: decode(list(ids)))
    return lambda ids: short(tuple(ids)) if len(ids) <= SHORT else decode(ids)


def point_at(run: RunView, place: int) -> dict[str, float]:
    return {name: values[place] for name, values in run.curves.items()}
