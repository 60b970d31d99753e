"""Read a trace file: steps with their stages, and episodes with their spans, of every rank."""

import json
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from areal_core.safety.received import lines_received
from areal_core.telemetry.trace_merge import MERGED, BrokenTrace, merge

EPISODE_SPANS = ("generation", "reward")


def take(fields: Any, name: str, kind: type[Any], where: str) -> Any:
    """Return a field of one kind; `float` accepts integers.

    Raises BrokenTrace, which names the field and its value.
    """
    value = fields.get(name) if isinstance(fields, dict) else None
    accepted = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
    if not accepted or (isinstance(value, int | float) and not abs(value) < 2**63):
        raise BrokenTrace(f"{where}: {name} is {value!r:.80}; the file is damaged, or of another version")
    return value


@dataclass
class Episode:
    """One episode. Seconds are sums over its spans, which may overlap."""

    name: str
    rank: int
    prompt_id: int
    sample_id: int
    start_s: float
    end_s: float
    status: str
    num_tokens: int
    generation_s: float = 0.0
    reward_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Duration of the episode."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Batch:
    """The step that a batch is for, and its prompts."""

    step: int
    prompts: frozenset[int]


@dataclass
class RankStep:
    """A training step on one rank; `stages` are (name, seconds, end) in the order of their ends."""

    rank: int
    step: int
    start_s: float
    end_s: float
    stages: list[tuple[str, float, float]]
    rollout_end_s: float
    prompts: frozenset[int]
    staleness: tuple[float, float] | None  # mean and maximum over the loss mask, in versions

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.end_s - self.start_s

    def stage_s(self, name: str) -> float:
        """Return the seconds in a stage; 0 if the step had none of this name."""
        return sum(seconds for stage, seconds, _ in self.stages if stage == name)


@dataclass(frozen=True)
class RunOptions:
    """The options of a run that the advice refers to; None if the run has no such option."""

    batch_size: int
    max_head_offpolicyness: int | None = None
    max_concurrent_rollouts: int | None = None
    n_samples: int | None = None
    max_new_tokens: int | None = None
    weight_update_mode: str | None = None


@dataclass
class RunTrace:
    """A complete trace. `choice` names the other runs in the same folder, if there are any."""

    file: Path
    num_ranks: int
    options: RunOptions
    choice: str = ""
    steps: list[RankStep] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def read_run(path: Path) -> RunTrace:
    """Read the trace of a run.

    Args:
        path: a merged file, the folder of the ranks' files, or a folder above it, such as that of
            all logs: the newest trace is read. It is merged if a rank has written since.

    Raises:
        ValueError: there is no trace, or the file has another format.
    """
    if path.is_file():
        return read_merged(path)
    newest, *others = trace_folders(path)
    trace = read_merged(merged_file(newest))
    if others:
        trace.choice = (
            f"{len(others) + 1} runs found in {path}, the newest was read ({newest}); "
            f"for another: areal-debug trace {shlex.quote(str(others[0]))}"
        )
    return trace


def trace_folders(folder: Path) -> list[Path]:
    """Return the folders of ranks' files at or below a folder, the last written first.

    Raises:
        ValueError: there are none.
    """
    if not folder.exists():
        raise ValueError(f"{folder} does not exist: give a trace file or the folder of a run's logs")
    files = sorted(folder.rglob("rank-*.jsonl"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    found = list(dict.fromkeys(file.parent for file in files))
    if not found:
        raise ValueError(
            f"{folder} contains no trace: run with rollout.enable_rollout_tracing=true, and give the folder of the run's logs"
        )
    return found


def merged_file(folder: Path) -> Path:
    merged = folder / MERGED
    newest = max(file.stat().st_mtime_ns for file in folder.glob("rank-*.jsonl"))
    if merged.exists() and merged.stat().st_mtime_ns >= newest:
        return merged
    return merge(folder)


def read_merged(file: Path) -> RunTrace:
    """Parse a merged file, line by line. Raises `BrokenTrace`."""
    lines = merged_lines(file)
    _, about = next(lines)
    trace = RunTrace(file, take(about, "world_size", int, str(file)), parse_options(about, str(file)))
    stages: list[tuple[int, str, float, float]] = []  # rank, name, start, end
    batches: list[tuple[int, float, Batch]] = []  # rank, time, batch
    staleness: list[tuple[int, float, float, float]] = []  # rank, time, mean, largest
    spans: list[tuple[int, str, str, float]] = []  # rank, episode, kind, seconds
    for where, event in lines:
        rank, args = take(event, "pid", int, where), take(event, "args", dict, where)
        kind, name = take(event, "ph", str, where), take(event, "name", str, where)
        if kind == "M":
            continue
        start_s, category = take(event, "ts", float, where) / 1e6, take(event, "cat", str, where)
        if kind == "X":
            end_s = start_s + take(event, "dur", float, where) / 1e6
            if category == "stage":
                stages.append((rank, name, start_s, end_s))
            elif category == "episode":
                trace.episodes.append(parse_episode(event, start_s, end_s, where))
            elif category in EPISODE_SPANS and "episode" in args:
                spans.append((rank, take(args, "episode", str, where), category, end_s - start_s))
        elif category == "batch":
            batches.append(parse_batch(event, start_s, where))
        elif category == "error":
            trace.errors.append(f"rank {rank}: {take(args, 'error', str, where)}")
        elif name == "staleness":
            lag = take(args, "mean", float, where), take(args, "max", float, where)
            staleness.append((rank, start_s, *lag))
    add_spans(trace.episodes, spans)
    trace.steps = assemble_steps(stages, batches, staleness)
    return trace


def merged_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = lines_received(file)
    head = next(lines, "")
    try:
        about = json.loads(head + "]}")["otherData"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BrokenTrace(
            f"{file} is not a trace of areal-debug: give its trace.json or its log folder"
        ) from error
    yield str(file), about
    for number, line in enumerate(lines, 2):
        if line.startswith("]"):
            return
        try:
            yield f"{file}, line {number}", json.loads(line.rstrip(",\n"))
        except (ValueError, RecursionError) as error:
            raise BrokenTrace(f"{file}, line {number}: not an event; copy the file again") from error


def parse_options(about: dict[str, Any], where: str) -> RunOptions:
    options = take(next(iter(take(about, "ranks", list, where)), None), "options", dict, where)
    kinds = {field.name: str if "str" in str(field.type) else int for field in fields(RunOptions)}
    given = {name: options[name] for name in kinds if options.get(name) is not None}
    found: dict[str, Any] = {name: take(given, name, kinds[name], where) for name in given}
    take(given, "batch_size", int, where)
    return RunOptions(**found)


def parse_episode(event: dict[str, Any], start_s: float, end_s: float, where: str) -> Episode:
    args = event["args"]
    return Episode(
        event["name"],
        event["pid"],
        take(args, "prompt_id", int, where),
        take(args, "sample_id", int, where),
        start_s,
        end_s,
        take(args, "status", str, where),
        take(args, "tokens", int, where),
    )


def parse_batch(event: dict[str, Any], at_s: float, where: str) -> tuple[int, float, Batch]:
    """Parse the event of a batch: rank, time, batch. Raises `BrokenTrace`."""
    prompts = take(event["args"], "prompts", list, where)
    if not all(isinstance(prompt, int) for prompt in prompts):
        raise BrokenTrace(f"{where}: prompts is {prompts!r:.80}; the file is damaged")
    return event["pid"], at_s, Batch(take(event["args"], "step", int, where), frozenset(prompts))


def add_spans(episodes: list[Episode], spans: list[tuple[int, str, str, float]]) -> None:
    named = {(episode.rank, episode.name): episode for episode in episodes}
    for rank, name, kind, seconds in spans:
        if (episode := named.get((rank, name))) is not None:  # None if the run ended first
            if kind == "generation":
                episode.generation_s += seconds
            else:
                episode.reward_s += seconds


def assemble_steps(
    stages: list[tuple[int, str, float, float]],
    batches: list[tuple[int, float, Batch]],
    staleness: list[tuple[int, float, float, float]],
) -> list[RankStep]:
    """Build steps from the stages named "step" and the stages inside them.

    Steps of a run without batches (SFT) are numbered from 0.
    """
    steps = []
    stages_of, batches_of, staleness_of = by_rank(stages), by_rank(batches), by_rank(staleness)
    for rank in sorted(stages_of):
        steps_of_rank = sorted((start, end) for name, start, end in stages_of[rank] if name == "step")
        inner = sorted((end, start, name) for name, start, end in stages_of[rank] if name != "step")
        taken, seen = batches_of[rank], staleness_of[rank]
        for number, (start, end) in enumerate(steps_of_rank):
            inside = [(name, e - s, e) for e, s, name in between(inner, start, end)]
            batch = next((batch for _, batch in between(taken, start, end)), None)
            lag = next(((mean, largest) for _, mean, largest in between(seen, start, end)), None)
            steps.append(
                RankStep(
                    rank=rank,
                    step=number if batch is None else batch.step,
                    start_s=start,
                    end_s=end,
                    stages=inside,
                    rollout_end_s=next((e for name, _, e in inside if name == "rollout"), start),
                    prompts=frozenset() if batch is None else batch.prompts,
                    staleness=lag,
                )
            )
    return steps


def by_rank(items: Iterable[tuple[Any, ...]]) -> defaultdict[int, list[Any]]:
    """Return the items of each rank, which is their first element, without it, in their order."""
    found = defaultdict(list)
    for rank, *rest in items:
        found[rank].append(tuple(rest))
    return found


def between(items: list[Any], start: float, end: float) -> list[Any]:
    """Return the items whose first element is in the interval; `items` are sorted by it."""
    from bisect import bisect_left, bisect_right

    return items[bisect_left(items, (start,)) : bisect_right(items, (end + 1e-9,))]
