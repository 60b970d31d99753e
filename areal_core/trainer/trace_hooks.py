"""Tracing of a run: wrappers of workflow, engine, reward and weight update, and a loop observer.

Each wrapper behaves as the object that it wraps and only measures time. Without tracing there are
no wrappers.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from areal_core.rollout.types import EpisodeSampler, ModelRequest, ModelResponse
from areal_core.rollout.workflow import RewardFn, RolloutWorkflow
from areal_core.safety.durable import disk_errors_as_warnings
from areal_core.servers.weight_update import NamedTensors, WeightUpdate
from areal_core.telemetry.trace import Span, Trace
from areal_core.telemetry.trace_merge import merge_if_all_ended


@dataclass(frozen=True)
class MemoryProfiler:
    """Keeps the history of memory during the training part of some steps.

    Attributes:
        folder: of the snapshots.
        rank: of this process.
        device: of the trainer.
        steps: to record.
        max_entries: the newest allocations that a GPU's history keeps.
    """

    folder: Path
    rank: int
    device: torch.device
    steps: frozenset[int]
    max_entries: int

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Record what the body allocates, if the step is one of `steps`."""
        if step not in self.steps:
            yield
            return
        file = self.folder / f"step_{step}" / f"rank-{self.rank:05d}"
        with self._on_gpu(file) if self.device.type == "cuda" else self._on_cpu(file):
            yield

    @contextmanager
    def _on_gpu(self, file: Path) -> Iterator[None]:
        torch.cuda.memory._record_memory_history(max_entries=self.max_entries)
        try:
            yield
        finally:
            with written(file):
                torch.cuda.memory._dump_snapshot(f"{file}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)

    @contextmanager
    def _on_cpu(self, file: Path) -> Iterator[None]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        profiler.start()
        try:
            yield
        finally:
            profiler.stop()
            with written(file):
                profiler.export_chrome_trace(f"{file}.json")


@contextmanager
def written(file: Path) -> Iterator[None]:
    """Make the folder of a file that the body writes; a full disk is a warning."""
    with disk_errors_as_warnings(f"{file} is not written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        yield


logger = logging.getLogger(__name__)

# Statistics that are drawn over time: the name of the track, and the statistic of each curve.
TRACKS = {
    "prompts": {name: f"rollout/{name}" for name in ("accepted", "rejected", "failed", "stale")},
    "reward": {"mean": "rollout/reward"},
}


class Tracing:
    """The tracing of one rank of a run; without a `trace` every object is returned unchanged.

    Args:
        trace: the trace of this rank; None disables tracing.
        save_interval: steps between two writes.
        profile_steps: steps that are profiled by torch.profiler.
        sessions: number of lines of the session log (one per episode) that are buffered in memory;
            None for no such file.
        memory: records memory, also without a trace.
    """

    def __init__(
        self,
        trace: Trace | None = None,
        save_interval: int = 1,
        profile_steps: Sequence[int] = (),
        sessions: int | None = None,
        memory: MemoryProfiler | None = None,
    ) -> None:
        self._memory = memory
        self._trace, self._sessions, self._save_interval = trace, None, save_interval
        self.observers: list[Callable[..., None]] = []
        if trace is None:
            return
        self.observers.append(partial(trace_training, trace))
        if profile_steps:
            self.observers.append(StepProfiler(trace.folder, trace.rank, profile_steps))
        if sessions is not None:
            self._sessions = SessionLog(trace.folder / f"sessions-r{trace.rank:05d}.jsonl", sessions)

    def workflow(self, workflow: RolloutWorkflow) -> RolloutWorkflow:
        """Return the workflow with its episodes and generations traced."""
        return workflow if self._trace is None else TracedWorkflow(workflow, self._trace, self._sessions)

    def reward(self, reward_fn: RewardFn) -> RewardFn:
        """Return the reward function, traced."""
        return reward_fn if self._trace is None else traced_reward(reward_fn, self._trace)

    def weight_update(self, update: WeightUpdate | None) -> WeightUpdate | None:
        return update if self._trace is None or update is None else TracedUpdate(update, self._trace)

    def memory(self, step: int) -> AbstractContextManager[None]:
        """Record the memory of the body, the training part of a step, if it is to be."""
        return nullcontext() if self._memory is None else self._memory.during(step)

    def commit(self, step: int, stats: dict[str, float]) -> None:
        """End a step: record its statistics that have a track, and write the trace if due."""
        if self._trace is None:
            return
        for track, curves in TRACKS.items():
            self._trace.counter(track, **{c: stats[name] for c, name in curves.items() if name in stats})
        if (step + 1) % self._save_interval == 0:
            self._trace.flush()

    def close(self) -> None:
        """End this rank's files; the last rank merges the traces of all."""
        if self._sessions is not None:
            self._sessions.close()
        if self._trace is not None:
            self._trace.close()
            # `areal-debug trace` merges it otherwise.
            with disk_errors_as_warnings("the trace was not merged"):
                merge_if_all_ended(self._trace.folder, self._trace.world_size)


NO_TRACING = Tracing()


class TracedWorkflow:
    """A workflow whose episodes, generations included, are traced.

    Args:
        sessions: called with each finished episode (`SessionLog`).
    """

    def __init__(
        self, workflow: RolloutWorkflow, trace: Trace, sessions: Callable[[Span], None] | None = None
    ) -> None:
        self._workflow, self._trace, self._sessions = workflow, trace, sessions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workflow, name)

    async def arun_episode(self, engine: EpisodeSampler, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Run the workflow's episode in a span with its status.

        The status is accepted, rejected (by the workflow), failed or cancelled.
        """
        with ExitStack() as afterwards:
            span = afterwards.enter_context(self._trace.episode(engine.prompt_id, engine.sample_id))
            if self._sessions is not None:
                afterwards.callback(self._sessions, span)
            span.args |= {"version": engine.version, "status": "cancelled", "tokens": 0}
            try:
                rows = await self._workflow.arun_episode(TracedEngine(engine, self._trace, span), data)
            except Exception as error:
                span.args |= {"status": "failed", "error": f"{type(error).__name__}: {error}"[:300]}
                raise
            span.args |= {"status": "rejected"} if rows is None else {"status": "accepted", **row_facts(rows)}
        return rows


class TracedEngine:
    """The engine of one episode; generations are children of the episode's span, from any task."""

    def __init__(self, engine: EpisodeSampler, trace: Trace, episode: Span) -> None:
        self._engine, self._trace, self._episode = engine, trace, episode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one completion in a span."""
        with self._trace.span("generation", "generation", self._episode) as span:
            response = await self._engine.agenerate(req)
            span.args |= {"prompt_tokens": len(response.input_tokens), "tokens": len(response.output_tokens)}
            span.args |= {"stop_reason": response.stop_reason, **version_range(response.output_versions)}
        return response


def traced_reward(reward_fn: RewardFn, trace: Trace) -> RewardFn:
    async def reward(*args: Any, **row: Any) -> float:
        with trace.span("reward", "reward"):
            return await reward_fn(*args, **row)

    return reward


class TracedUpdate:
    """A weight update that is drawn on the trainer's track, with its version."""

    def __init__(self, update: WeightUpdate, trace: Trace) -> None:
        self._update, self._trace = update, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._update, name)

    def send(self, weights: NamedTensors, version: int) -> None:
        """Send the weights, as a stage named "push" of the step."""
        start_ns = time.perf_counter_ns()
        try:
            self._update.send(weights, version)
        finally:
            self._trace.stage("push", start_ns, time.perf_counter_ns(), version=version)
        self._trace.counter("weight version", version=version)


def trace_training(trace: Trace, event: str, **facts: Any) -> None:
    """Observe the training loop: prompts and staleness of each step, and a final error."""
    if event == "batch":
        trace_batch(trace, facts["step"], facts["version"], facts["batch"])
    elif event == "end" and facts["error"] is not None:
        trace.instant("error", "error", error=facts["error"][:300])


def trace_batch(trace: Trace, step: int, version: int, batch: dict[str, Tensor]) -> None:
    prompts = sorted(set(batch["prompt_id"].tolist()))
    tokens = int(batch["attention_mask"].sum())
    trace.instant("batch", "batch", step=step, version=version, prompts=prompts, tokens=tokens)
    staleness = version - batch["versions"][batch["loss_mask"].bool()].float()  # [tokens]
    if len(staleness):
        trace.counter("staleness", mean=float(staleness.mean()), max=float(staleness.max()))


class SessionLog:
    """One JSON line per episode with its durations, in `sessions-r00000.jsonl` next to the trace.

    Args:
        flush_threshold: number of episodes that are buffered in memory.
    """

    def __init__(self, path: Path, flush_threshold: int) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._lines: list[str] = []
        self._flush_threshold = flush_threshold
        # Seconds between the epoch and the origin of the spans' clock.
        self._origin_s = time.time() - time.perf_counter()

    def __call__(self, episode: Span) -> None:
        def seconds(category: str) -> float:
            return sum((end - start) / 1e9 for name, start, end in episode.phases if name == category)

        end_ns = time.perf_counter_ns()
        line = {
            "task_id": episode.args["prompt_id"],
            "session_id": episode.args["sample_id"],
            "status": episode.args["status"],
            "submit_ts": self._origin_s + episode.start_ns / 1e9,
            "finalized_ts": self._origin_s + end_ns / 1e9,
            "total_s": (end_ns - episode.start_ns) / 1e9,
            "generate_s": seconds("generation"),
            "reward_s": seconds("reward"),
            "phases": [
                {"name": name, "start_ts": self._origin_s + start / 1e9, "s": (end - start) / 1e9}
                for name, start, end in episode.phases
            ],
        }
        self._lines.append(json.dumps(line) + "\n")
        if len(self._lines) >= self._flush_threshold:
            self.flush()

    def flush(self) -> None:
        """Write the buffered lines."""
        lines, self._lines = self._lines, []
        with disk_errors_as_warnings(f"{len(lines)} episodes are missing in {self._file.name}"):
            self._file.write("".join(lines))
            self._file.flush()

    def close(self) -> None:
        """Write the buffered lines and close the file."""
        self.flush()
        with disk_errors_as_warnings(f"{self._file.name} may lack its end"):
            self._file.close()


class StepProfiler:
    """An observer that profiles the training part of some steps with torch.profiler.

    It writes Chrome traces: `profile-r00000-step3.json`.
    """

    def __init__(self, folder: Path, rank: int, steps: Sequence[int]) -> None:
        self._folder, self._rank, self._steps = folder, rank, frozenset(steps)
        self._profiler: torch.profiler.profile | None = None

    def __call__(self, event: str, **facts: Any) -> None:
        if event == "batch" and facts["step"] in self._steps:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        elif event in ("weights", "end") and self._profiler is not None:
            self._profiler.stop()
            if event == "weights":
                file = self._folder / f"profile-r{self._rank:05d}-step{facts['step']}.json"
                self._profiler.export_chrome_trace(str(file))
            self._profiler = None


def row_facts(rows: dict[str, Tensor]) -> dict[str, Any]:
    reward = float(rows["rewards"].float().mean())
    return {
        "reward": reward if math.isfinite(reward) else str(reward),
        "tokens": int(rows["loss_mask"].sum()),
        "rows": len(rows["rewards"]),
        **version_range(rows["versions"][rows["loss_mask"].bool()].tolist()),
    }


def version_range(versions: list[int]) -> dict[str, int]:
    return {"oldest_version": min(versions), "newest_version": max(versions)} if versions else {}
