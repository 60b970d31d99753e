"""Run an agent under the load of training: a batch of prompts with a group of samples each.

    executor (rollout loop) --> MeasuredWorkflow.arun_episode x batch x group --> AgentWorkflow
                                 times it, catches its exceptions               on the agents' loop
    LoopMonitor watches the rollout loop and the agents' loop.

An error does not stop the run: all errors are counted and grouped by their message.
"""

import contextlib
import gc
import itertools
import re
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch import Tensor

from areal_core.agent.agent_workflow import AgentWorkflow
from areal_core.rollout.errors import NothingAccepted
from areal_core.rollout.pipeline import Executor
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.types import EpisodeSampler, InferenceEngine
from areal_core.rollout.workflow import RolloutWorkflow
from areal_core.servers.health import percentile
from areal_debug.agent.engine import TimedEngine
from areal_debug.agent.loop_monitor import LoopMonitor, LoopReport

VARIABLE_PART = re.compile(r"0x[0-9a-f]+|[0-9a-f]{16,}|\d+")


@dataclass(frozen=True)
class Latency:
    """Percentiles of durations in seconds."""

    count: int
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


@dataclass
class CollectorPauses:
    """Measure the pauses of Python's garbage collector, as a context manager."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    _began: float = 0.0

    def __enter__(self) -> "CollectorPauses":
        gc.callbacks.append(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, facts: dict[str, int]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._began = now
            return
        self.count += 1
        self.total_s += now - self._began
        self.longest_s = max(self.longest_s, now - self._began)


@dataclass(frozen=True)
class ErrorGroup:
    """Episodes whose error messages are equal except for numbers and ids."""

    count: int
    message: str  # of the first
    traceback: str  # of the first


@dataclass(frozen=True)
class StressReport:
    """The outcome of all episodes, their throughput, and the lag of the event loops."""

    agent: str
    engine: str
    num_prompts: int
    group_size: int
    most_at_once: int  # episodes
    wall_s: float
    num_finished: int
    mean_reward: float | None
    num_output_tokens: int
    episodes: Latency
    calls: Latency
    errors: list[ErrorGroup]
    loops: list[LoopReport]
    collection: CollectorPauses

    @property
    def is_healthy(self) -> bool:
        """True if no episode failed and nothing blocked an event loop."""
        return not self.errors and not any(loop.blocked() for loop in self.loops)


@dataclass
class MeasuredWorkflow:
    """A workflow that times its episodes and counts their exceptions instead of raising them."""

    workflow: RolloutWorkflow
    durations_s: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    running: int = 0
    most_at_once: int = 0

    async def arun_episode(self, engine: EpisodeSampler, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Run one episode. Return None if it raised."""
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        began = time.monotonic()
        try:
            rows = await self.workflow.arun_episode(engine, data)
        except Exception as error:  # the boundary: errors are counted, and the load continues
            self.errors.append(error)
            return None
        finally:
            self.running -= 1
            self.durations_s.append(time.monotonic() - began)
        if rows is not None:
            self.rewards.append(float(rows["rewards"].mean()))
        return rows


def stress(
    workflow: RolloutWorkflow,
    engine: InferenceEngine,
    names: tuple[str, str],
    data: Sequence[dict[str, Any]],
    num_prompts: int,
    group_size: int,
) -> StressReport:
    """Run `num_prompts` rows, repeated if there are fewer, `group_size` times each, all at once.

    `names` are those of the agent or workflow, and of the engine.
    """
    calls: list[tuple[float, int]] = []  # seconds and number of tokens of each
    timed = TimedEngine(engine, lambda answer, took_s: calls.append((took_s, len(answer.output_tokens))))
    measured = MeasuredWorkflow(workflow)
    executor = Executor(timed, StalenessControl(num_prompts + 1, num_prompts))
    prompts = list(enumerate(itertools.islice(itertools.cycle(data), num_prompts)))
    # A warm-up that is not measured: libraries import modules lazily, which is slow once.
    run_all(executor, [(num_prompts, prompts[0][1])], MeasuredWorkflow(workflow), 1)
    calls.clear()
    watched = {"rollout": executor.loop}
    if isinstance(workflow, AgentWorkflow):
        watched = {"agents": workflow.agents, **watched}
    monitors = [LoopMonitor(name, loop.loop, loop.thread) for name, loop in watched.items()]
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            collection = stack.enter_context(CollectorPauses())
            for monitor in monitors:
                stack.enter_context(monitor)
            run_all(executor, prompts, measured, group_size)
    finally:
        wall_s = time.monotonic() - began
        executor.close()
    return StressReport(
        agent=names[0],
        engine=names[1],
        num_prompts=num_prompts,
        group_size=group_size,
        most_at_once=measured.most_at_once,
        wall_s=wall_s,
        num_finished=len(measured.rewards),
        mean_reward=sum(measured.rewards) / len(measured.rewards) if measured.rewards else None,
        num_output_tokens=sum(num_tokens for _, num_tokens in calls),
        episodes=latency_of(measured.durations_s),
        calls=latency_of([took_s for took_s, _ in calls]),
        errors=group_errors(measured.errors),
        loops=[monitor.report() for monitor in monitors],
        collection=collection,
    )


def run_all(
    executor: Executor,
    prompts: Sequence[tuple[int, dict[str, Any]]],
    measured: MeasuredWorkflow,
    group_size: int,
) -> None:
    """Wait for all episodes. If every one failed, their errors are in `measured`."""
    with contextlib.suppress(NothingAccepted):
        executor.rollout_batch(prompts, measured, n_samples=group_size)


def latency_of(durations_s: Sequence[float]) -> Latency:
    ordered = sorted(durations_s)
    values = (percentile(ordered, percent) for percent in (50, 90, 99, 100))
    return Latency(len(ordered), *values)


def group_errors(errors: Sequence[Exception]) -> list[ErrorGroup]:
    """Group errors of one type and one message except for numbers and ids, most frequent first."""
    groups: dict[str, list[Exception]] = defaultdict(list)
    for error in errors:
        groups[VARIABLE_PART.sub("#", f"{type(error).__name__}: {error}")].append(error)
    return [
        ErrorGroup(
            count=len(group),
            message=f"{type(group[0]).__name__}: {group[0]}",
            traceback="".join(traceback.format_exception(group[0])),
        )
        for group in sorted(groups.values(), key=len, reverse=True)
    ]
