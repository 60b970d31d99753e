"""A trace file as plain data: steps with their stages, and episodes with their parts, of every rank."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_core.telemetry.trace_merge import MERGED, BrokenTrace, merge

EPISODE_PARTS = ("generation", "reward")


@dataclass
class Episode:
    """One episode. Seconds are sums over its parts, which may overlap."""

    name: str
    rank: int
    prompt_id: int
    start_s: float
    end_s: float
    status: str
    num_tokens: int
    generation_s: float = 0.0
    reward_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass
class RankStep:
    """A training step on one rank; `stages` are (name, seconds), in the order in which they ended."""

    rank: int
    step: int
    start_s: float
    end_s: float
    stages: list[tuple[str, float]]
    rollout_end_s: float
    prompts: frozenset[int]
    staleness: tuple[float, float] | None  # mean and largest age of the trained tokens, in versions

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def stage_s(self, name: str) -> float:
        """Seconds in a stage; 0 when the step had none of this name."""
        return sum(seconds for stage, seconds in self.stages if stage == name)


@dataclass(frozen=True)
class RunOptions:
    """The options of a run that advice is about; None where it has no such option."""

    batch_size: int
    max_head_offpolicyness: int | None = None
    max_concurrent_rollouts: int | None = None
    n_samples: int | None = None
    max_new_tokens: int | None = None
    weight_update_mode: str | None = None


@dataclass
class RunTrace:
    """A whole trace."""

    file: Path
    num_ranks: int
    options: RunOptions
    steps: list[RankStep] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def read_run(path: Path) -> RunTrace:
    """The trace of a run.

    Args:
        path: a merged file, the folder of the ranks' files, or a run's log folder; folders are merged if they have news.

    Raises:
        ValueError: there is no trace, or the file is none of ours.
    """
    return read_merged(path if path.is_file() else merged_file(path))


def merged_file(folder: Path) -> Path:
    """The merged file of a run, written anew when a rank has written since.

    Raises:
        ValueError: the run was not traced.
    """
    if not folder.exists():
        raise ValueError(f"{folder} does not exist: give a trace file or the folder of a run's logs")
    ranks = sorted(folder.glob("rank-*.jsonl")) or sorted((folder / "trace").glob("rank-*.jsonl"))
    if not ranks:
        raise ValueError(
            f"{folder} holds no trace: run with rollout.enable_rollout_tracing=true, and give the folder of the run's logs"
        )
    merged = ranks[0].parent / MERGED
    newest = max(file.stat().st_mtime_ns for file in ranks)
    if merged.exists() and merged.stat().st_mtime_ns >= newest:
        return merged
    return merge(ranks[0].parent)


def read_merged(file: Path) -> RunTrace:
    """Parses a merged file, line by line. Raises `BrokenTrace`."""
    lines = merged_lines(file)
    about, _ = next(lines)
    trace = RunTrace(file, about["world_size"], RunOptions(**about["ranks"][0]["options"]))
    stages: list[tuple[int, str, float, float]] = []  # rank, name, start, end
    instants: dict[str, list[dict[str, Any]]] = {"batch": [], "error": []}
    ages: list[tuple[int, float, float, float]] = []  # rank, time, mean, largest
    parts: list[tuple[int, str, str, float]] = []  # rank, episode, kind, seconds
    for _, event in lines:
        rank, args = event["pid"], event["args"]
        if event["ph"] == "X":
            start_s, end_s = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            if event["cat"] == "stage":
                stages.append((rank, event["name"], start_s, end_s))
            elif event["cat"] == "episode":
                trace.episodes.append(parse_episode(event, start_s, end_s))
            elif event["cat"] in EPISODE_PARTS and "episode" in args:
                parts.append((rank, args["episode"], event["cat"], end_s - start_s))
        elif event["ph"] == "i":
            instants[event["cat"]].append(event)
        elif event["ph"] == "C" and event["name"] == "staleness":
            ages.append((rank, event["ts"] / 1e6, args["mean"], args["max"]))
    add_parts(trace.episodes, parts)
    trace.steps = assemble_steps(stages, instants["batch"], ages)
    trace.errors = [f"rank {event['pid']}: {event['args']['error']}" for event in instants["error"]]
    return trace


def merged_lines(file: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What stands at the head of a merged file, then that with each event."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        head = next(lines, "")
        try:
            about = json.loads(head + "]}")["otherData"]
            about["ranks"][0]["options"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise BrokenTrace(
                f"{file} is no trace that a run of ours wrote: give its trace.json or its log folder"
            ) from error
        yield about, {}
        for number, line in enumerate(lines, 2):
            if line.startswith("]"):
                return
            try:
                yield about, json.loads(line.rstrip(",\n"))
            except ValueError as error:
                raise BrokenTrace(f"{file}, line {number}: not an event; copy the file again") from error


def parse_episode(event: dict[str, Any], start_s: float, end_s: float) -> Episode:
    args = event["args"]
    return Episode(
        event["name"],
        event["pid"],
        args["prompt_id"],
        start_s,
        end_s,
        args["status"],
        args["tokens"],
    )


def add_parts(episodes: list[Episode], parts: list[tuple[int, str, str, float]]) -> None:
    """Adds to each episode the seconds of its parts."""
    named = {(episode.rank, episode.name): episode for episode in episodes}
    for rank, name, kind, seconds in parts:
        if (episode := named.get((rank, name))) is not None:  # absent when the run ended in its midst
            if kind == "generation":
                episode.generation_s += seconds
            else:
                episode.reward_s += seconds


def assemble_steps(
    stages: list[tuple[int, str, float, float]],
    batches: list[dict[str, Any]],
    ages: list[tuple[int, float, float, float]],
) -> list[RankStep]:
    """Steps from the stages named "step" and what lies inside them; a run without batches (SFT) is numbered from 0."""
    steps = []
    for rank in sorted({stage[0] for stage in stages}):
        whole = sorted((start, end) for r, name, start, end in stages if r == rank and name == "step")
        inner = sorted((end, start, name) for r, name, start, end in stages if r == rank and name != "step")
        taken = [(event["ts"] / 1e6, event["args"]) for event in batches if event["pid"] == rank]
        seen = [(at, mean, largest) for r, at, mean, largest in ages if r == rank]
        for number, (start, end) in enumerate(whole):
            inside = [(name, e - s, e) for e, s, name in between(inner, start, end)]
            batch = next((args for _, args in between(taken, start, end)), None)
            age = next(((mean, largest) for _, mean, largest in between(seen, start, end)), None)
            steps.append(
                RankStep(
                    rank=rank,
                    step=number if batch is None else batch["step"],
                    start_s=start,
                    end_s=end,
                    stages=[(name, seconds) for name, seconds, _ in inside],
                    rollout_end_s=next((e for name, _, e in inside if name == "rollout"), start),
                    prompts=frozenset(batch["prompts"] if batch is not None else ()),
                    staleness=age,
                )
            )
    return steps


def between(items: list[Any], start: float, end: float) -> list[Any]:
    """The items whose first member lies in the interval; `items` ascend by it."""
    from bisect import bisect_left, bisect_right

    return items[bisect_left(items, (start,)) : bisect_right(items, (end + 1e-9,))]
