"""`areal-debug trace`: show where slow steps spent their time, from the trace of a run."""

from pathlib import Path

import click

from areal_debug.cli import Verb, force_option, json_option, output_option, step_option
from areal_debug.render import announce, refuse_existing


@click.command(cls=Verb, example="areal-debug trace runs/logs -o trace.html")
@click.argument("run", metavar="RUN_OR_FILE", type=click.Path(path_type=Path))
@step_option("the slowest after the first")
@output_option("Also write an HTML page.")
@force_option
@click.option("--all", "all_steps", is_flag=True, help="List every step in the table.")
@json_option
def command(
    run: Path, step: int | None, output: Path | None, force: bool, all_steps: bool, as_json: bool
) -> None:
    """Show where the steps of a traced run spent their time, and what to change.

    RUN_OR_FILE is a trace.json, the folder of a run's logs, or one above it, whose newest trace is
    read. A run is traced with
    rollout.enable_rollout_tracing=true or perf_tracer.enabled=true.

    Exit code 0: no step after the first took more than twice the median. 1: one did. 2: there are
    too few steps.
    """
    refuse_existing(output, force)
    from areal_debug.report.frame import Frame
    from areal_debug.report.page import write_report
    from areal_debug.report.terminal import answer
    from areal_debug.trace.read import read_run
    from areal_debug.trace.report import MAX_LINES, STYLE, report_document, report_of
    from areal_debug.trace.steps import report_on

    announce(f"reading the traces of {run}")
    trace = read_run(run)
    report = report_on(trace, step)
    if output is not None:
        frame = Frame("Steps", str(trace.file.parent), "trace", report.verdict)
        write_report(output, report_of(trace, report), frame, style=STYLE.read_text())
    shown = report_of(trace, report, len(report.steps) if all_steps else MAX_LINES)
    answer(report_document(trace, report), shown, as_json)
