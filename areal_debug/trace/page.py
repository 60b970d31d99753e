"""Write a trace as one HTML page: slow steps, where their time went, and on which rank."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from areal_debug.render import format_seconds
from areal_debug.report.charts import Span, stacked, timeline
from areal_debug.report.frame import Frame, Link
from areal_debug.report.links import RecordPage
from areal_debug.report.page import write_template
from areal_debug.trace.read import Episode, RankStep, RunTrace
from areal_debug.trace.render import HEADINGS, describe, format_spread, short, spent, verdict
from areal_debug.trace.steps import OF_CRITIC, StepTimes, TraceReport

MOST_BARS = 500  # of the steps, evenly chosen: the slow ones are kept
MOST_ROWS = 1000
MOST_RANKS = 64


def write_page(
    file: Path,
    trace: RunTrace,
    report: TraceReport,
    run: str = "",
    links: Sequence[Link] = (),
    record_page: RecordPage | None = None,
) -> None:
    """Write the page atomically."""
    shown, word = report.shown, "slow" if report.slow else "healthy"
    frame = Frame(verdict(report).plain, run or str(trace.file.parent), "trace", word, links)
    facts: dict[str, Any] = {
        "verdict": word,
        "headline": verdict(report).plain,
        "summary": f"{len(report.steps)} steps on {trace.num_ranks} ranks, median {format_seconds(report.median_s)}",
        "notes": [note for note in (trace.choice, *(f"the run ended with {e}" for e in trace.errors)) if note],
        "step": shown.step,
        "spent": spent(shown),
        "facts": facts_of(shown, report, record_page),
        "stages": list(HEADINGS.items()),
        "bars": stacked(
            [(f"step {times.step}, {format_seconds(times.seconds)}", list(times.stages.values())) for times in chosen(report)],
            list(HEADINGS),
            f"step {report.steps[0].step}",
            f"step {report.steps[-1].step}",
        ),
        "ranks": ranks_of(trace, shown.step),
        "rows": [row_of(times, times.step in report.slow) for times in report.steps[-MOST_ROWS:]],
        "num_left_out": max(0, len(report.steps) - MOST_ROWS),
        "file": str(trace.file),
    }  # fmt: skip
    write_template(
        file, "trace/trace.html", frame, facts, style=(Path(__file__).parent / "trace.css").read_text()
    )


def facts_of(
    shown: StepTimes, report: TraceReport, record_page: RecordPage | None
) -> list[tuple[str, str, str]]:
    """Return what is known of the explained step: label, text, address in the record's page."""

    def address(episode: Episode) -> str:
        at = (shown.step, episode.prompt_id, episode.sample_id)
        return "" if record_page is None else record_page.address(*at)

    finding = report.finding
    return [
        *([("longest", describe(e), address(e))] if (e := shown.longest) else []),
        *([("last", f"{describe(e)} completed the batch", address(e))] if (e := shown.last) else []),
        ("because", finding.because, ""),
        ("change", finding.change, ""),
        ("refuted by", finding.refuted_by, ""),
    ]


def chosen(report: TraceReport) -> list[StepTimes]:
    """Return at most about `MOST_BARS` steps, evenly chosen, and every slow one."""
    every = -(-len(report.steps) // MOST_BARS)
    slow = {*report.slow, report.shown.step}
    return [times for place, times in enumerate(report.steps) if place % every == 0 or times.step in slow]


def ranks_of(trace: RunTrace, step: int) -> list[tuple[str, Any]]:
    """Return a timeline of a step for each rank, on the clock of the rank that began first."""
    ranks = {rank_step.rank: rank_step for rank_step in trace.steps if rank_step.step == step}
    of_ranks = [ranks[rank] for rank in sorted(ranks)[:MOST_RANKS]]
    start_s = min(rank_step.start_s for rank_step in of_ranks)
    end_s = max(rank_step.end_s for rank_step in of_ranks)
    return [
        (f"rank {rank_step.rank}", timeline(described(rank_step), spans_of(rank_step), start_s, end_s))
        for rank_step in of_ranks
    ]


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
        if stage in HEADINGS:
            yield Span(stage, end_s - seconds, end_s, f"{name}, {format_seconds(seconds)}")


def row_of(times: StepTimes, is_slow: bool) -> dict[str, Any]:
    return {
        "step": times.step,
        "is_slow": is_slow,
        "seconds": format_seconds(times.seconds),
        "stages": [(short(times.stages[stage]), stage == times.bottleneck) for stage in HEADINGS],
        "generation": format_spread(times.generation),
        "staleness": "-" if times.staleness is None else f"{times.staleness[0]:.2f}/{times.staleness[1]:.0f}",
        "longest": "-" if times.longest is None else describe(times.longest),
    }
