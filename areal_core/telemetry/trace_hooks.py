"""Where a run is traced: wrappers around workflow, engine, reward and push, and an observer of the training loop.

Each wrapper behaves as what it wraps and only takes the time. Without tracing none of them is there.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from areal_core.rollout.engine import InferenceEngine
from areal_core.rollout.types import ModelRequest, ModelResponse
from areal_core.rollout.weight_push import NamedTensors, WeightPush
from areal_core.rollout.workflow import RewardFn, RolloutWorkflow
from areal_core.telemetry.trace import Span, Trace
from areal_core.telemetry.trace_merge import merge_if_all_ended

logger = logging.getLogger(__name__)

# Statistics that are drawn over time: the name of the track, and each curve's name among the statistics.
TRACKS = {
    "prompts": {name: f"rollout/{name}" for name in ("accepted", "rejected", "failed", "stale")},
    "reward": {"mean": "rollout/reward"},
}


class Tracing:
    """All that traces one rank of a run, or, without a `trace`, nothing: then every part is passed through as it is.

    Args:
        save_interval: steps between two writes.
        profile_steps: steps that torch.profiler watches.
        sessions: write one line an episode, too, of which so many are held in memory; None for no such file.
    """

    def __init__(
        self,
        trace: Trace | None = None,
        save_interval: int = 1,
        profile_steps: Sequence[int] = (),
        sessions: int | None = None,
    ) -> None:
        self._trace, self._sessions, self._save_interval = trace, None, save_interval
        self.observers: list[Callable[..., None]] = []
        if trace is None:
            return
        self.observers.append(TraceObserver(trace))
        if profile_steps:
            self.observers.append(StepProfiler(trace.folder, trace.rank, profile_steps))
        if sessions is not None:
            self._sessions = SessionLog(trace.folder / f"sessions-r{trace.rank:05d}.jsonl", sessions)

    def workflow(self, workflow: RolloutWorkflow) -> RolloutWorkflow:
        """The workflow, its episodes and generations traced."""
        return workflow if self._trace is None else TracedWorkflow(workflow, self._trace, self._sessions)

    def reward(self, reward_fn: RewardFn) -> RewardFn:
        """The reward, traced."""
        return reward_fn if self._trace is None else traced_reward(reward_fn, self._trace)

    def push(self, push: WeightPush | None) -> WeightPush | None:
        """The push of weights, traced."""
        return push if self._trace is None or push is None else TracedPush(push, self._trace)

    def commit(self, step: int, stats: dict[str, float]) -> None:
        """The end of a step: draws those of its statistics that have a track, and writes when it is time to."""
        if self._trace is None:
            return
        for track, curves in TRACKS.items():
            self._trace.counter(track, **{c: stats[name] for c, name in curves.items() if name in stats})
        if (step + 1) % self._save_interval == 0:
            self._trace.flush()

    def close(self) -> None:
        """Ends this rank's files; the last rank merges the traces of all."""
        if self._sessions is not None:
            self._sessions.close()
        if self._trace is not None:
            self._trace.close()
            with warned_of_disk("the trace was not merged"):  # `areal-debug trace` will
                merge_if_all_ended(self._trace.folder, self._trace.world_size)


NO_TRACING = Tracing()


class TracedWorkflow:
    """A workflow whose episodes, generations included, are traced.

    Args:
        sessions: is told of each finished episode (`SessionLog`).
    """

    def __init__(
        self, workflow: RolloutWorkflow, trace: Trace, sessions: Callable[[Span], None] | None = None
    ) -> None:
        self._workflow, self._trace, self._sessions = workflow, trace, sessions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workflow, name)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """The workflow's own episode. Its span says how it went: accepted, rejected (by the workflow), failed or cancelled."""
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
    """The engine as one episode sees it; its generations are parts of the episode, whichever task asks for them."""

    def __init__(self, engine: InferenceEngine, trace: Trace, episode: Span) -> None:
        self._engine, self._trace, self._episode = engine, trace, episode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        with self._trace.span("generation", "generation", self._episode) as span:
            response = await self._engine.agenerate(req)
            span.args |= {"prompt_tokens": len(response.input_tokens), "tokens": len(response.output_tokens)}
            span.args |= {"stop_reason": response.stop_reason, **version_range(response.output_versions)}
        return response


def traced_reward(reward_fn: RewardFn, trace: Trace) -> RewardFn:
    """The same reward; its span includes the wait for a free worker."""

    async def reward(*args: Any, **row: Any) -> float:
        with trace.span("reward", "reward"):
            return await reward_fn(*args, **row)

    return reward


class TracedPush:
    """A weight push that is drawn on the trainer's lane, with its version."""

    def __init__(self, push: WeightPush, trace: Trace) -> None:
        self._push, self._trace = push, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._push, name)

    def push(self, weights: NamedTensors, version: int) -> None:
        start_ns = time.perf_counter_ns()
        try:
            self._push.push(weights, version)
        finally:
            self._trace.stage("push", start_ns, time.perf_counter_ns(), version=version)
        self._trace.counter("weight version", version=version)


class TraceObserver:
    """What the training loop tells: which prompts a step takes and how old its tokens are, and what ended it."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __call__(self, event: str, **facts: Any) -> None:
        if event == "batch":
            self._batch(facts["step"], facts["version"], facts["batch"])
        elif event == "end" and facts["error"] is not None:
            self._trace.instant("error", "error", error=facts["error"][:300])

    def _batch(self, step: int, version: int, batch: dict[str, Tensor]) -> None:
        prompts = batch["prompt_id"].unique().tolist()
        tokens = int(batch["attention_mask"].sum())
        self._trace.instant("batch", "batch", step=step, version=version, prompts=prompts, tokens=tokens)
        ages = version - batch["versions"][batch["loss_mask"].bool()].float()
        if len(ages):
            self._trace.counter("staleness", mean=float(ages.mean()), max=float(ages.max()))


class SessionLog:
    """One JSON line an episode: how long it took and where, as `sessions-r00000.jsonl` beside the trace.

    Args:
        flush_threshold: episodes held in memory.
    """

    def __init__(self, path: Path, flush_threshold: int) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._lines: list[str] = []
        self._flush_threshold = flush_threshold
        # Seconds since the epoch of the clock that spans are taken with.
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
        lines, self._lines = self._lines, []
        with warned_of_disk(f"{len(lines)} episodes are missing in {self._file.name}"):
            self._file.write("".join(lines))
            self._file.flush()

    def close(self) -> None:
        self.flush()
        with warned_of_disk(f"{self._file.name} may lack its end"):
            self._file.close()


@contextmanager
def warned_of_disk(consequence: str) -> Iterator[None]:
    """Turns a full or broken disk into a warning: it must not end a run that is only watched."""
    try:
        yield
    except OSError as error:
        logger.warning("%s: %s", consequence, error)


class StepProfiler:
    """An observer that runs torch.profiler over the training part of some steps: `profile-r00000-step3.json`, a Chrome trace."""

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
    """What an episode's rows say about it."""
    reward = float(rows["rewards"].float().mean())
    return {
        "reward": reward if math.isfinite(reward) else str(reward),
        "tokens": int(rows["loss_mask"].sum()),
        "rows": len(rows["rewards"]),
        **version_range(rows["versions"][rows["loss_mask"].bool()].tolist()),
    }


def version_range(versions: list[int]) -> dict[str, int]:
    """The oldest and the newest weights that sampled these tokens."""
    return {"oldest_version": min(versions), "newest_version": max(versions)} if versions else {}
