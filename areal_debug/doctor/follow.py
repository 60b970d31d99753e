"""Follow the metrics of a running training, and announce each alarm once.

    look ──> a confined child reads and judges all that was logged ──> document
      │ an alarm of two looks, with new steps between them, or of the last look
      └──> printed, hook, stop

The time to the next look grows with the CPU time of the last one, so that following takes at most
0.5 % of this machine's cores, and nothing in the training processes.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_debug.doctor import hooks as actions
from areal_debug.doctor.examine import EXIT_CODES, document, examine
from areal_debug.doctor.hooks import Hooks, Report
from areal_debug.doctor.read import read_run
from areal_debug.doctor.sources.plain_files import SeveralRuns, UnreadableRun
from hangdoctor.watch.loop import lives
from recorder.confine import bounds_for, run_confined

SHARE = 0.004  # of the cores; the first look is paid for by those after it
POLL_S = 0.5


@dataclass
class Follower:
    """The alarms of one run that were announced so far.

    Args:
        announce: gets each alarm once, as of the JSON report.
        report: gets one sentence for whatever else happens.
        pid: the launcher, for a hook that stops it.
        every_s: time between two looks, at least.
        label: name of the run for hooks, by default of the path.
    """

    path: Path
    announce: Callable[[Mapping[str, Any]], None]
    report: Report
    hooks: Hooks = field(default_factory=Hooks)
    run: str | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    pid: int | None = None
    every_s: float = 10.0
    label: str = ""
    verdict: str = "unknown"
    announced: set[str] = field(default_factory=set)
    suspected: dict[str, int] = field(default_factory=dict)  # points at the look that found it
    num_points: int = 0
    num_steps: int = 0
    grew_at: float = field(default_factory=time.monotonic)
    due_at: float = 0.0
    is_stopped: bool = False
    problem: str = ""
    reported: set[str] = field(default_factory=set)

    @property
    def exit_code(self) -> int:
        """0: healthy. 1: an alarm was announced. 2: there was nothing to judge."""
        return 1 if self.announced else EXIT_CODES[self.verdict]

    def poll(self) -> None:
        """Look, if it is time to."""
        if time.monotonic() >= self.due_at:
            before_s = cpu_seconds()
            self.look()
            share_s = (cpu_seconds() - before_s) / SHARE / len(os.sched_getaffinity(0))
            self.due_at = time.monotonic() + max(self.every_s, share_s)

    def look(self, is_last: bool = False) -> None:
        """Read and judge what was logged; metrics that are not there yet are waited for.

        Raises SeveralRuns.
        """
        try:
            found = run_confined(
                self.judge,
                bounds_for([self.path], reads=[self.path.parent]),
                errors=(SeveralRuns, UnreadableRun),
            )
        except SeveralRuns:
            raise
        except (ValueError, OSError, RuntimeError) as error:
            # once; a file that is just being written is readable at the next look
            if str(error) not in self.reported and (not self.num_points or str(error) == self.problem):
                self.report(f"no metrics could be read: {error}")
                self.reported.add(str(error))
            self.problem = str(error)
            return
        if found["num_points"] != self.num_points:
            self.num_points, self.grew_at = found["num_points"], time.monotonic()
        self.verdict, self.num_steps = found["verdict"], found["num_steps"]
        alarms = {alarm["id"]: alarm for alarm in found["alarms"]}
        self.suspected = {name: points for name, points in self.suspected.items() if name in alarms} | {
            name: self.num_points for name in alarms if name not in self.suspected
        }
        for name, points in self.suspected.items():
            if name not in self.announced and (is_last or points != self.num_points):
                self.announced.add(name)
                self.act(alarms[name], is_last)

    def judge(self) -> dict[str, Any]:
        """Return the report as JSON types, and how many values it is about."""
        run = read_run(self.path, self.run, self.given)
        points = sum(len(series.steps) for series in run.by_name.values())
        return document(run, examine(run)) | {"num_points": points}

    def act(self, alarm: Mapping[str, Any], is_last: bool) -> None:
        """Announce an alarm, run its hook, and stop the run if that was chosen."""
        self.announce(alarm)
        actions.run_hooks(alarm, self.label or self.run or self.path.name, self.hooks, self.report)
        if self.pid is None or is_last or self.is_stopped or not lives(self.pid):
            return
        if actions.is_chosen(alarm, self.hooks.stop_on):
            self.report(f"stopping the run for {alarm['id']}: SIGTERM to process {self.pid}")
            actions.stop(self.pid)
            self.is_stopped = True


def cpu_seconds() -> float:
    return sum(os.times()[:4])


def follow(follower: Follower, idle_s: float | None) -> int:
    """Follow a run until its process ends, or nothing new was logged for a time.

    Returns the exit code.
    """
    pattern = "events.out.tfevents.*"
    if follower.path.match(pattern) or next(follower.path.rglob(pattern), None) is not None:
        from areal_debug.doctor.sources import events

        events.import_reader()
    while (follower.pid is None or lives(follower.pid)) and (
        idle_s is None or time.monotonic() - follower.grew_at < idle_s
    ):
        follower.poll()
        time.sleep(min(POLL_S, follower.every_s))
    follower.look(is_last=True)
    follower.report(
        f"followed {follower.num_steps} steps: {follower.verdict}, {len(follower.announced)} findings"
    )
    return follower.exit_code
