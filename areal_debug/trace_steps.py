"""Where each step spent its time, which step was slow, and what to change: pure functions of a trace."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from areal_debug.trace_read import Episode, RankStep, RunOptions, RunTrace

SLOW = 2.0  # a step this many times as long as the median is slow
LONG_TAIL = 2.0  # an episode this many times as long as half of them
STAGES = ("rollout", "compute_advantage", "train_step", "update_weights", "save")
OF_CRITIC = {"compute_advantage": "critic_values", "train_step": "critic_train_step"}  # told with the actor's


@dataclass(frozen=True)
class Spread:
    """Seconds of many episodes: half took at most `p50_s`."""

    p50_s: float
    p95_s: float
    longest_s: float


@dataclass(frozen=True)
class StepTimes:
    """A step, told by the rank that waited longest for its rollouts: the others waited for it afterwards, in a collective.

    `stages` are seconds by stage, `other` included. Episodes are those that gave this step's batch on that rank.
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
        return self.stages[stage] / self.seconds if self.seconds else 0.0

    @property
    def bottleneck(self) -> str:
        return max(self.stages, key=lambda stage: self.stages[stage])


@dataclass(frozen=True)
class Finding:
    """Why a step took long, and what to do about it."""

    because: str
    change: str
    refuted_by: str


@dataclass(frozen=True)
class TraceReport:
    """All steps, the one to look at, and why. `slow` are the steps that took more than `SLOW` times the median."""

    steps: list[StepTimes]
    median_s: float
    slow: list[int]
    shown: StepTimes
    finding: Finding
    episodes: dict[str, int] = field(default_factory=dict)  # number by status


def report_on(trace: RunTrace, step: int | None = None) -> TraceReport:
    """The whole report; `step` chooses the step to explain, by default the slowest after the first.

    Raises:
        ValueError: the trace holds no whole step, or not this one.
    """
    steps = step_times(trace)
    if not steps:
        raise ValueError(f"{trace.file} holds no finished training step: the run ended before its first")
    by_number = {times.step: times for times in steps}
    if step is not None and step not in by_number:
        raise ValueError(f"step {step} is not in the trace: it holds {steps[0].step} to {steps[-1].step}")
    # The first step pays for what happens once: compilation, connections, the group with the servers.
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
    """One line a step, ascending; of a step that was taken twice (a run that continued), the last time."""
    by_step: dict[int, dict[int, RankStep]] = {}
    for rank_step in trace.steps:
        by_step.setdefault(rank_step.step, {})[rank_step.rank] = rank_step
    by_prompt: dict[tuple[int, int], list[Episode]] = {}
    for episode in trace.episodes:
        by_prompt.setdefault((episode.rank, episode.prompt_id), []).append(episode)
    return [times_of(list(by_step[step].values()), by_prompt) for step in sorted(by_step)]


def times_of(ranks: Sequence[RankStep], by_prompt: dict[tuple[int, int], list[Episode]]) -> StepTimes:
    """One step over its ranks."""
    # Of ranks that hold the same rows one samples; the others wait for it a little longer than it does.
    sampling = [r for r in ranks if any((r.rank, prompt) in by_prompt for prompt in r.prompts)]
    slowest = max(sampling or ranks, key=lambda rank_step: rank_step.stage_s("rollout"))
    stages = {name: slowest.stage_s(name) for name in STAGES}
    for name, of_critic in OF_CRITIC.items():
        stages[name] += slowest.stage_s(of_critic)
    stages["other"] = max(0.0, slowest.seconds - sum(stages.values()))
    episodes = [e for prompt in slowest.prompts for e in by_prompt.get((slowest.rank, prompt), ())]
    in_time = [e for e in episodes if e.end_s <= slowest.rollout_end_s]
    ages = [rank_step.staleness for rank_step in ranks if rank_step.staleness is not None]
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
        staleness=(statistics.fmean(a for a, _ in ages), max(b for _, b in ages)) if ages else None,
    )


def spread(seconds: Iterable[float]) -> Spread | None:
    """Nearest-rank percentiles; None of nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return Spread(percentile(ordered, 50), percentile(ordered, 95), ordered[-1])


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the ascending values do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def episodes_of(trace: RunTrace, times: StepTimes) -> list[Episode]:
    """The episodes behind a step's batch on its slowest rank, longest first."""
    prompts = next(
        (s.prompts for s in reversed(trace.steps) if (s.step, s.rank) == (times.step, times.rank)),
        frozenset(),
    )
    found = [e for e in trace.episodes if e.rank == times.rank and e.prompt_id in prompts]
    return sorted(found, key=lambda episode: -episode.seconds)


def explain(times: StepTimes, episodes: Sequence[Episode], options: RunOptions) -> Finding:
    """What the longest stage of a step points to."""
    if times.bottleneck != "rollout":
        return STAGE_FINDINGS[times.bottleneck]
    total = sum(episode.seconds for episode in episodes)
    if not episodes or not total:
        return Finding(
            "the batch came from nowhere that is traced",
            "trace the run whose rollouts it waits for",
            "episodes in the trace",
        )
    rewards = sum(episode.reward_s for episode in episodes) / total
    own = 1 - rewards - sum(episode.generation_s for episode in episodes) / total
    if rewards > 0.5:
        return reward_finding(rewards, times)
    if own > 0.5:
        return Finding(
            f"episodes spend {own:.0%} of their time neither generating nor in the reward, but in the workflow's own code",
            "run the agent alone (`areal-debug agent stress`): it names what blocks; make tool calls asynchronous",
            "generation that takes longer than half of an episode",
        )
    half_s = percentile(sorted(episode.seconds for episode in episodes), 50)
    if times.longest is not None and times.longest.seconds > LONG_TAIL * half_s:
        return tail_finding(times.longest, half_s, options)
    return Finding(
        f"its {len(episodes)} episodes generate evenly slowly: half take {half_s:.2f} s, the longest "
        f"{episodes[0].seconds:.2f} s",
        f"add inference servers, or let more run at once (rollout.max_concurrent_rollouts is "
        f"{options.max_concurrent_rollouts}), or start the next batch earlier (rollout.max_head_offpolicyness is "
        f"{options.max_head_offpolicyness})",
        "servers that are idle while episodes run: then the client is the limit",
    )


def reward_finding(share: float, times: StepTimes) -> Finding:
    longest = f", the longest {times.reward.longest_s:.2f} s" if times.reward else ""
    return Finding(
        f"episodes spend {share:.0%} of their time in the reward{longest}, the wait for a free worker included",
        "give the reward more worker processes, or make it faster; a reward that calls a service should be asynchronous",
        "workers that are idle while episodes wait",
    )


def tail_finding(longest: Episode, half_s: float, options: RunOptions) -> Finding:
    ahead = options.max_head_offpolicyness
    start_earlier = (
        "let the next batch be sampled meanwhile (rollout.max_head_offpolicyness is 0)"
        if ahead == 0
        else f"allow more staleness (rollout.max_head_offpolicyness is {ahead})"
    )
    return Finding(
        f"{longest.name} of rank {longest.rank} took {longest.seconds:.2f} s ({longest.num_tokens:,} tokens), half of the "
        f"episodes {half_s:.2f} s or less: the batch waited for few",
        f"{start_earlier}, or sample shorter (gconfig.max_new_tokens is {options.max_new_tokens})",
        "a longest episode that is not among the last to end",
    )


STAGE_FINDINGS = {
    "compute_advantage": Finding(
        "logprobs and advantages took longest",
        "let micro-batches be larger (actor.mb_spec.max_tokens_per_mb), or leave out what is not used: "
        "actor.recompute_logprob, the reference",
        "torch.profiler (perf_tracer.profile_steps) showing little time in forward passes",
    ),
    "train_step": Finding(
        "the optimizer's steps took longest",
        "let micro-batches be larger (actor.mb_spec.max_tokens_per_mb), turn gradient checkpointing off if memory "
        "allows, or train on more ranks",
        "torch.profiler (perf_tracer.profile_steps) showing ranks that wait for each other",
    ),
    "update_weights": Finding(
        "the push of weights took longest",
        "broadcast instead of writing files (actor.weight_update_mode), or put both on faster links",
        "a push that is fast when no generation is running: then the pause is what takes long",
    ),
    "save": Finding(
        "writing checkpoints took longest",
        "save less often (saver.freq_steps), or to a faster disk",
        "a fast write of as many bytes to the same folder",
    ),
    "other": Finding(
        "most of the step is outside the traced stages",
        "look at the trainer's track in the trace file; `areal-debug hang` shows where a rank stands",
        "stages that cover the step in the trace file",
    ),
}
