"""Print the report of `areal-debug trace`: verdict, steps, and why one of them was slow."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_debug.render import format_seconds, one_line
from areal_debug.trace.read import Episode, RunTrace
from areal_debug.trace.steps import SLOW, Spread, StepTimes, TraceReport

MAX_LINES = 40
WORDS = {
    "rollout": "waiting for rollouts",
    "compute_advantage": "in logprobs and advantages",
    "train_step": "in optimizer steps",
    "update_weights": "in weight sync",
    "save": "saving",
    "other": "outside the traced stages",
}
HEADINGS = {
    "rollout": "rollout",
    "compute_advantage": "advantage",
    "train_step": "train",
    "update_weights": "sync",
    "save": "save",
    "other": "other",
}


def print_report(out: Console, trace: RunTrace, report: TraceReport, max_lines: int = MAX_LINES) -> None:
    """Print verdict, evidence, what to change, what would refute it, and the path of the file."""
    out.print(verdict(report))
    if trace.choice:
        out.print(one_line(trace.choice, style="yellow"))
    out.print(table_of(report.steps, max_lines))
    print_shown(out, report)
    statuses = ", ".join(f"{count:,} {status}" for status, count in report.episodes.items())
    out.print(one_line(f"steps {len(report.steps)}, ranks {trace.num_ranks}, episodes {statuses or 'none'}"))
    for error in trace.errors:
        out.print(one_line(f"the run ended with {error}", style="red"))
    out.print(
        one_line(f"the complete trace, for ui.perfetto.dev or chrome://tracing: {trace.file}", style="dim")
    )


def verdict(report: TraceReport) -> Text:
    """Return one line: the slow steps, and where the time is spent."""
    shown = report.shown
    median = format_seconds(report.median_s)
    share = f"{shown.share(shown.bottleneck):.0%} of step {shown.step} was spent {WORDS[shown.bottleneck]}"
    if report.slow:
        listed = ", ".join(map(str, report.slow[:10])) + (" ..." if len(report.slow) > 10 else "")
        plural = "s" if len(report.slow) > 1 else ""
        return one_line(
            f"Slow: step{plural} {listed} took more than {SLOW:g} times the median of {median}; {share}",
            style="bold red",
        )
    return one_line(
        f"Steady: no step took more than {SLOW:g} times the median of {median}; {share}", style="bold"
    )


def table_of(steps: list[StepTimes], max_lines: int) -> Table:
    """Make a table with one row per step; of more than `max_lines`, the first and the last."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("step", "time", *HEADINGS.values()):
        table.add_column(heading, justify="right")
    for heading in ("generation p50/p95/longest", "reward p95", "staleness mean/max"):
        table.add_column(heading, justify="right")
    table.add_column("longest episode")
    left_out = max(0, len(steps) - max_lines)
    head = max_lines // 2 if left_out else len(steps)
    for times in steps[:head]:
        table.add_row(*cells(times))
    if left_out:
        table.add_row("...", f"{left_out:,} omitted")
    for times in steps[head + left_out :]:
        table.add_row(*cells(times))
    return table


def cells(times: StepTimes) -> list[Text]:
    """Return a step as a row of the table, its longest stage highlighted."""
    stages = [
        one_line(short(times.stages[stage]), style="yellow" if stage == times.bottleneck else "")
        for stage in HEADINGS
    ]
    staleness = "-" if times.staleness is None else f"{times.staleness[0]:.2f}/{times.staleness[1]:.0f}"
    rest = (
        format_spread(times.generation),
        "-" if times.reward is None else short(times.reward.p95_s),
        staleness,
        "-" if times.longest is None else describe(times.longest),
    )
    return [one_line(str(times.step)), one_line(format_seconds(times.seconds)), *stages, *map(one_line, rest)]


def format_spread(seconds: Spread | None) -> str:
    """Format median, 95th percentile and maximum."""
    if seconds is None:
        return "-"
    return " / ".join(short(s) for s in (seconds.p50_s, seconds.p95_s, seconds.longest_s))


def short(seconds: float) -> str:
    """Format seconds for a table; less than a millisecond is a dot."""
    return format_seconds(seconds) if seconds >= 0.001 else "·"


def describe(episode: Episode) -> str:
    """Return an episode's name, rank and duration."""
    return f"{episode.name} rank {episode.rank} {format_seconds(episode.seconds)}"


def print_shown(out: Console, report: TraceReport) -> None:
    shown, finding = report.shown, report.finding
    out.print()
    out.print(one_line(f"Step {shown.step}: {format_seconds(shown.seconds)}", style="bold"))
    out.print(one_line(f"  time      {spent(shown)}"))
    if shown.longest is not None:
        e = shown.longest
        out.print(
            one_line(
                f"  longest   {describe(e)}: generation {format_seconds(e.generation_s)}, reward "
                f"{format_seconds(e.reward_s)}, {e.num_tokens:,} tokens"
            )
        )
    if shown.last is not None:
        out.print(one_line(f"  last      {describe(shown.last)} completed the batch"))
    out.print(one_line(f"  because   {finding.because}"))
    out.print(one_line(f"  change    {finding.change}", style="green"))
    out.print(one_line(f"  refuted   by {finding.refuted_by}", style="dim"))
    out.print()


def spent(times: StepTimes) -> str:
    ordered = sorted(times.stages.items(), key=lambda stage: -stage[1])
    parts = [f"{format_seconds(s)} {WORDS[name]}" for name, s in ordered if s >= 0.005 * times.seconds]
    return ", ".join(parts) + f" (rank {times.rank})"


def report_document(trace: RunTrace, report: TraceReport) -> dict[str, Any]:
    """Return the same report as JSON types."""

    def episode_document(episode: Episode | None) -> dict[str, Any] | None:
        return None if episode is None else asdict(episode) | {"seconds": episode.seconds}

    def step_document(times: StepTimes) -> dict[str, Any]:
        named = {"longest": episode_document(times.longest), "last": episode_document(times.last)}
        return asdict(times) | named | {"bottleneck": times.bottleneck}

    return {
        "file": str(trace.file),
        "choice": trace.choice,
        "num_ranks": trace.num_ranks,
        "median_s": report.median_s,
        "slow_steps": report.slow,
        "step": step_document(report.shown),
        "finding": asdict(report.finding),
        "episodes": report.episodes,
        "errors": trace.errors,
        "steps": [step_document(times) for times in report.steps],
    }
