"""Pure functions of a trace: where each step spent its time, which was slow, and what to change."""

import math
import statistics
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from areal_debug.trace.read import Episode, RankStep, RunOptions, RunTrace

SLOW = 2.0  # a step this many times as long as the median is slow
FEWEST_STEPS = 3  # after the first: of two, none can take twice their median
LONG_TAIL = 2.0  # an episode this many times as long as the median
STAGES = ("rollout", "compute_advantage", "train_step", "update_weights", "save")
# Stages of the critic are added to those of the actor.
OF_CRITIC = {"compute_advantage": "critic_values", "train_step": "critic_train_step"}


@dataclass(frozen=True)
class Spread:
    """Seconds of many episodes."""

    p50_s: float
    p95_s: float
    longest_s: float


@dataclass(frozen=True)
class StepTimes:
    """A step on the rank that waited longest for its rollouts.

    The other ranks waited for it afterwards, in a collective. `stages` are seconds by stage,
    `other` included. Episodes are those in this step's batch on that rank.
    """

    step: int
    rank: int
    seconds: float
    stages: dict[str, float]
    num_episodes: int
    generation: Spread | None
    reward: Spread | None
    longest: Episode | None
    last: Episode | None  # the one that the batch waited for
    staleness: tuple[float, float] | None

    def share(self, stage: str) -> float:
        """Return the share of a stage in the duration of the step."""
        return self.stages[stage] / self.seconds if self.seconds else 0.0

    @property
    def bottleneck(self) -> str:
        """The stage that took longest."""
        return max(self.stages, key=lambda stage: self.stages[stage])


@dataclass(frozen=True)
class TraceFinding:
    """The cause of a slow step, what to change, and what would refute it."""

    because: str
    change: str
    refuted_by: str


@dataclass(frozen=True)
class TraceReport:
    """All steps, the step to explain, and the finding.

    `slow` are the steps that took more than `SLOW` times the median.
    """

    steps: list[StepTimes]
    median_s: float
    slow: list[int]
    shown: StepTimes
    finding: TraceFinding
    episodes: dict[str, int] = field(default_factory=dict)  # number by status

    @property
    def verdict(self) -> Literal["slow", "healthy", "unknown"]:
        """Return "unknown" if there are too few steps to compare."""
        if self.slow:
            return "slow"
        return "healthy" if len(self.steps) > FEWEST_STEPS else "unknown"


def report_on(trace: RunTrace, step: int | None = None) -> TraceReport:
    """Analyse a trace; `step` is the step to explain, by default the slowest after the first.

    Raises:
        ValueError: the trace contains no complete step, or not this one.
    """
    steps = step_times(trace)
    if not steps:
        raise ValueError(f"{trace.file} contains no finished training step: the run ended before its first")
    by_number = {times.step: times for times in steps}
    if step is not None and step not in by_number:
        raise ValueError(f"step {step} is not in the trace: it contains {steps[0].step} to {steps[-1].step}")
    # The first step includes one-time costs: compilation, connections, the group with the servers.
    settled = steps[1:] or steps
    median_s = statistics.median(times.seconds for times in settled)
    slow = [times.step for times in settled if times.seconds > SLOW * median_s]
    shown = by_number[step] if step is not None else max(settled, key=lambda times: times.seconds)
    episodes = episodes_of(trace, shown)
    statuses = sorted({episode.status for episode in trace.episodes})
    return TraceReport(
        steps,
        median_s,
        slow,
        shown,
        explain(shown, episodes, trace.options),
        {status: sum(e.status == status for e in trace.episodes) for status in statuses},
    )


def step_times(trace: RunTrace) -> list[StepTimes]:
    """Return one entry per step, ascending.

    Of a step that a continued run repeated, the last one counts.
    """
    by_step: dict[int, dict[int, RankStep]] = {}
    for rank_step in trace.steps:
        by_step.setdefault(rank_step.step, {})[rank_step.rank] = rank_step
    by_prompt: dict[tuple[int, int], list[Episode]] = {}
    for episode in trace.episodes:
        by_prompt.setdefault((episode.rank, episode.prompt_id), []).append(episode)
    return [times_of(list(by_step[step].values()), by_prompt) for step in sorted(by_step)]


def times_of(ranks: Sequence[RankStep], by_prompt: dict[tuple[int, int], list[Episode]]) -> StepTimes:
    # Of ranks with the same rows only one samples; the others wait for it slightly longer.
    sampling = [r for r in ranks if any((r.rank, prompt) in by_prompt for prompt in r.prompts)]
    slowest = max(sampling or ranks, key=lambda rank_step: rank_step.stage_s("rollout"))
    stages = {name: slowest.stage_s(name) for name in STAGES}
    for name, of_critic in OF_CRITIC.items():
        stages[name] += slowest.stage_s(of_critic)
    stages["other"] = max(0.0, slowest.seconds - sum(stages.values()))
    episodes = [e for prompt in slowest.prompts for e in by_prompt.get((slowest.rank, prompt), ())]
    in_time = [e for e in episodes if e.end_s <= slowest.rollout_end_s]
    staleness = [rank_step.staleness for rank_step in ranks if rank_step.staleness is not None]
    return StepTimes(
        step=slowest.step,
        rank=slowest.rank,
        seconds=slowest.seconds,
        stages=stages,
        num_episodes=len(episodes),
        generation=spread(episode.generation_s for episode in episodes),
        reward=spread(episode.reward_s for episode in episodes),
        longest=max(episodes, key=lambda episode: episode.seconds, default=None),
        last=max(in_time, key=lambda episode: episode.end_s, default=None),
        staleness=(statistics.fmean(a for a, _ in staleness), max(b for _, b in staleness))
        if staleness
        else None,
    )


def spread(seconds: Iterable[float]) -> Spread | None:
    """Compute nearest-rank percentiles; None of an empty sequence."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return Spread(percentile(ordered, 50), percentile(ordered, 95), ordered[-1])


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of the sorted values do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def episodes_of(trace: RunTrace, times: StepTimes) -> list[Episode]:
    prompts = next(
        (s.prompts for s in reversed(trace.steps) if (s.step, s.rank) == (times.step, times.rank)),
        frozenset(),
    )
    found = [e for e in trace.episodes if e.rank == times.rank and e.prompt_id in prompts]
    return sorted(found, key=lambda episode: -episode.seconds)


def explain(times: StepTimes, episodes: Sequence[Episode], options: RunOptions) -> TraceFinding:
    """Explain the longest stage of a step."""
    if times.bottleneck != "rollout":
        return STAGE_FINDINGS[times.bottleneck]
    total = sum(episode.seconds for episode in episodes)
    if not episodes or not total:
        return TraceFinding(
            "the batch came from a source that is not traced",
            "trace the run whose rollouts it waits for",
            "episodes in the trace",
        )
    rewards = sum(episode.reward_s for episode in episodes) / total
    own = 1 - rewards - sum(episode.generation_s for episode in episodes) / total
    if rewards > 0.5:
        return reward_finding(rewards, times)
    if own > 0.5:
        return TraceFinding(
            f"episodes spend {own:.0%} of their time neither generating nor in the reward, but in the workflow's own code",
            "run the agent alone (`areal-debug agent stress`): it names the blocking code; make tool calls asynchronous",
            "generation that takes longer than half of an episode",
        )
    half_s = percentile(sorted(episode.seconds for episode in episodes), 50)
    if times.longest is not None and times.longest.seconds > LONG_TAIL * half_s:
        return tail_finding(times.longest, half_s, options)
    return TraceFinding(
        f"its {len(episodes)} episodes generate evenly slowly: half take {half_s:.2f} s, the longest "
        f"{episodes[0].seconds:.2f} s",
        f"add inference servers, or allow more concurrency (rollout.max_concurrent_rollouts is "
        f"{options.max_concurrent_rollouts}), or start the next batch earlier (rollout.max_head_offpolicyness is "
        f"{options.max_head_offpolicyness})",
        "servers that are idle while episodes run: then the client is the bottleneck",
    )


def reward_finding(share: float, times: StepTimes) -> TraceFinding:
    longest = f", the longest {times.reward.longest_s:.2f} s" if times.reward else ""
    return TraceFinding(
        f"episodes spend {share:.0%} of their time in the reward{longest}, the wait for a free worker included",
        "give the reward more worker processes, or make it faster; a reward that calls a service should be asynchronous",
        "workers that are idle while episodes wait",
    )


def tail_finding(longest: Episode, half_s: float, options: RunOptions) -> TraceFinding:
    ahead = options.max_head_offpolicyness
    start_earlier = (
        "use asynchronous rollouts (rollout.max_head_offpolicyness is 0)"
        if ahead == 0
        else f"allow more staleness (rollout.max_head_offpolicyness is {ahead})"
    )
    return TraceFinding(
        f"{longest.name} of rank {longest.rank} took {longest.seconds:.2f} s ({longest.num_tokens:,} tokens), half of the "
        f"episodes {half_s:.2f} s or less: the batch waited for stragglers",
        f"{start_earlier}, or sample shorter completions (gconfig.max_new_tokens is {options.max_new_tokens})",
        "a longest episode that is not among the last to end",
    )


STAGE_FINDINGS = {
    stage: TraceFinding(**row)
    for stage, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
