"""What `areal-debug trace` says: slow steps, where their time went, on which rank, and why."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from areal_debug.render import count, format_seconds
from areal_debug.report.charts import Span, stacked, timeline
from areal_debug.report.links import RecordPage
from areal_debug.report.model import Block, Cell, Facts, Picture, Report, Row, Table, tone_of
from areal_debug.trace.read import Episode, RankStep, RunTrace
from areal_debug.trace.steps import FEWEST_STEPS, OF_CRITIC, SLOW, Spread, StepTimes, TraceReport

MAX_LINES = 40  # on a terminal
MOST_BARS = 500  # of the steps, evenly chosen: the slow ones are kept
MOST_ROWS = 1000
MOST_RANKS = 64
STYLE = Path(__file__).parent / "trace.css"
# Heading of a stage, and what a step did in it.
STAGES = {
    "rollout": ("rollout", "waiting for rollouts"),
    "compute_advantage": ("advantage", "in logprobs and advantages"),
    "train_step": ("train", "in optimizer steps"),
    "update_weights": ("sync", "in weight sync"),
    "save": ("save", "saving"),
    "other": ("other", "outside the traced stages"),
}


def report_of(
    trace: RunTrace, report: TraceReport, max_lines: int = MAX_LINES, record_page: RecordPage | None = None
) -> Report:
    """Return the report; a terminal lists at most `max_lines` steps."""
    statuses = ", ".join(f"{count:,} {status}" for status, count in report.episodes.items())
    left_out = max(0, len(report.steps) - MOST_ROWS)
    traced = len({step.rank for step in trace.steps})
    ranks = f"{traced} of {trace.num_ranks}" if traced < trace.num_ranks else str(traced)
    blocks: list[Block] = [
        table_of(trimmed(report.steps, max_lines), report, "terminal"),
        Facts(
            rows_of_step(report, record_page),
            f"Step {report.shown.step}: {format_seconds(report.shown.seconds)}",
        ),
        Picture(bars(report), "stages of each step on the rank that waited longest for its rollouts", True),
        Picture(ranks_of(trace, report.shown.step), f"ranks in step {report.shown.step}", True),
        table_of(report.steps[-MOST_ROWS:], report, "page", f"{left_out} earlier steps are left out"),
        f"steps {len(report.steps)}, ranks {ranks}, episodes {statuses or 'none'}",
        *(f"the run ended with {error}" for error in trace.errors),
        f"the complete trace, for ui.perfetto.dev or chrome://tracing: {trace.file}",
    ]
    word, sentence = verdict(report)
    return Report(word, sentence, tone_of(report.verdict), blocks, [trace.choice] if trace.choice else [])


def verdict(report: TraceReport) -> tuple[str, str]:
    """Return the slow steps, and where the time is spent, in one line."""
    shown, median = report.shown, format_seconds(report.median_s)
    spent_in = STAGES[shown.bottleneck][1]
    share = f"{shown.share(shown.bottleneck):.0%} of step {shown.step} was spent {spent_in}"
    if report.verdict == "unknown":
        least = count(FEWEST_STEPS + 1, "step")
        return "Too few steps", f"{len(report.steps)}, and a slow one shows among {least} or more; {share}"
    if not report.slow:
        return (
            "Steady",
            f"after the first, no step took more than {SLOW:g} times the median of {median}; {share}",
        )
    listed = ", ".join(map(str, report.slow[:10])) + (" ..." if len(report.slow) > 10 else "")
    plural = "s" if len(report.slow) > 1 else ""
    return "Slow", f"step{plural} {listed} took more than {SLOW:g} times the median of {median}; {share}"


def trimmed(steps: list[StepTimes], max_lines: int) -> list[StepTimes | int]:
    """Return the first and the last steps, and the number of those left out between them."""
    left_out = max(0, len(steps) - max_lines)
    head = max_lines // 2 if left_out else len(steps)
    return [*steps[:head], *([left_out] if left_out else []), *steps[head + left_out :]]


def table_of(steps: Iterable[StepTimes | int], report: TraceReport, only: Any, more: str = "") -> Table:
    """Make a table with one row per step."""
    headings = ["step>", "time>", *(f"{heading}>" for heading, _ in STAGES.values())]
    headings += ["generation p50/p95/longest>", "reward p95>", "staleness mean/max>", "longest episode"]
    rows = [
        ["...", f"{times:,} omitted"] if isinstance(times, int) else cells(times, times.step in report.slow)
        for times in steps
    ]
    return Table(headings, rows, more=more if more[:1] != "0" else "", only=only)


def cells(times: StepTimes, is_slow: bool) -> list[str | Cell]:
    """Return a step as a row of the table, its longest stage highlighted."""
    return [
        str(times.step),
        Cell(format_seconds(times.seconds), "bad" if is_slow else ""),
        *(Cell(short(times.stages[s]), "unsure" if s == times.bottleneck else "") for s in STAGES),
        format_spread(times.generation),
        "-" if times.reward is None else short(times.reward.p95_s),
        "-" if times.staleness is None else f"{times.staleness[0]:.2f}/{times.staleness[1]:.0f}",
        "-" if times.longest is None else describe(times.longest),
    ]


def format_spread(seconds: Spread | None) -> str:
    """Format median, 95th percentile and maximum."""
    if seconds is None:
        return "-"
    return " / ".join(short(s) for s in (seconds.p50_s, seconds.p95_s, seconds.longest_s))


def short(seconds: float) -> str:
    """Format seconds for a table; less than a millisecond is a dot."""
    return format_seconds(seconds) if seconds >= 0.001 else "·"


def describe(episode: Episode) -> str:
    return f"{episode.name} rank {episode.rank} {format_seconds(episode.seconds)}"


def rows_of_step(report: TraceReport, record_page: RecordPage | None) -> list[Row]:
    """Return what is known of the explained step."""
    shown, finding = report.shown, report.finding

    def row(label: str, episode: Episode | None, rest: str) -> list[Row]:
        if episode is None:
            return []
        at = (shown.step, episode.prompt_id, episode.sample_id)
        address = "" if record_page is None else record_page.address(*at)
        return [Row(label, f"{describe(episode)}{rest}", address=address)]

    times = (
        ""
        if (e := shown.longest) is None
        else f": generation {format_seconds(e.generation_s)}, reward {format_seconds(e.reward_s)}, {e.num_tokens:,} tokens"
    )
    return [
        Row("time", spent(shown)),
        *row("longest", shown.longest, times),
        *row("last", shown.last, " completed the batch"),
        Row("because", finding.because),
        Row("change", finding.change, "good"),
        Row("refuted by", finding.refuted_by, "dim"),
    ]


def spent(times: StepTimes) -> str:
    ordered = sorted(times.stages.items(), key=lambda stage: -stage[1])
    parts = [f"{format_seconds(s)} {STAGES[name][1]}" for name, s in ordered if s >= 0.005 * times.seconds]
    return ", ".join(parts) + f" (rank {times.rank})"


def bars(report: TraceReport) -> Markup:
    """Draw the stages of at most about `MOST_BARS` steps, evenly chosen, and of every slow one."""
    every = -(-len(report.steps) // MOST_BARS)
    slow = {*report.slow, report.shown.step}
    steps = [times for place, times in enumerate(report.steps) if place % every == 0 or times.step in slow]
    columns = [(f"step {t.step}, {format_seconds(t.seconds)}", list(t.stages.values())) for t in steps]
    keys = [Markup('<span class="key {}">{}</span> ').format(stage, STAGES[stage][0]) for stage in STAGES]
    legend = Markup('<p class="legend">{}</p>').format(Markup("").join(keys))
    ends = (f"step {report.steps[0].step}", f"step {report.steps[-1].step}")
    return legend + stacked(columns, list(STAGES), *ends)


def ranks_of(trace: RunTrace, step: int) -> Markup:
    """Draw a timeline of a step for each rank, on the clock of the rank that began first."""
    ranks = {rank_step.rank: rank_step for rank_step in trace.steps if rank_step.step == step}
    of_ranks = [ranks[rank] for rank in sorted(ranks)[:MOST_RANKS]]
    start_s = min(rank_step.start_s for rank_step in of_ranks)
    end_s = max(rank_step.end_s for rank_step in of_ranks)
    drawn = [
        Markup("<p>rank {}</p><figure>{}</figure>").format(
            rank_step.rank, timeline(described(rank_step), spans_of(rank_step), start_s, end_s)
        )
        for rank_step in of_ranks
    ]
    return Markup('<div class="ranks">{}</div>').format(Markup("").join(drawn))


def described(rank_step: RankStep) -> str:
    """Return the stages of a rank's step in words."""
    stages = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds, _ in rank_step.stages)
    return f"rank {rank_step.rank}, {format_seconds(rank_step.seconds)}: {stages}"


def spans_of(rank_step: RankStep) -> Iterable[Span]:
    """Yield the stages of a rank's step; what is not in a stage of the page is `other`."""
    actors = {critic: stage for stage, critic in OF_CRITIC.items()}
    yield Span("other", rank_step.start_s, rank_step.end_s, "outside the traced stages")
    for name, seconds, end_s in rank_step.stages:
        stage = actors.get(name, name)
        if stage in STAGES:
            yield Span(stage, end_s - seconds, end_s, f"{name}, {format_seconds(seconds)}")


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
