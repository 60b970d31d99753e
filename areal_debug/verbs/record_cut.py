"""What is printed about a cut: its numbers, and where a record that is replayed was cut from."""

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_debug.cli import Verb, code_option, force_option, json_option, model_option
from areal_debug.render import QUIET, REPORT_FILE, announce, count, format_bytes, is_quiet, note, read_report
from areal_debug.replay.report import numbers_of
from areal_debug.report.model import Level, Report
from areal_debug.report.terminal import print_answer

if TYPE_CHECKING:
    from replayer.bug.cut_request import CutRequest


@click.command(
    cls=Verb,
    short_help="Cut a record to one step, or to rows that show a bug, in one file",
    example="areal-debug record cut runs/record --step 3 --to bug.zip\n"
    "areal-debug record cut runs/record --step 3 --shrink 'loss is nan' --to bug.zip",
)
@click.argument("record", type=click.Path())
@click.option("--step", type=int, required=True, metavar="N", help="Number of the step.")
@click.option("--to", "destination", required=True, metavar="PLACE", help="Folder, file.zip, or fsspec URL.")
@click.option("--shrink", "symptom", metavar="EXPR", help="Remove rows, then tokens, while this is true.")
@click.option(
    "--max-seconds",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    help="End of --shrink; the best so far is written.",
)
@click.option("--no-check", is_flag=True, help="Do not replay the file once it is written.")
@model_option
@code_option
@force_option
@json_option
def cut(
    record: str,
    step: int,
    destination: str,
    symptom: str | None,
    max_seconds: float,
    no_check: bool,
    model: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write one step of RECORD, with the weights before it, into a record that needs nothing else:
    `areal-debug replay bug.zip` gives the same bits elsewhere.

    \b
    --shrink   'loss is nan', 'grad_norm > 100', 'max(rewards) > 10'
    may use    loss, grad_norm, stats["NAME"], num_rows, num_tokens, error; and lists:
               rewards, advantages, logprobs, lengths

    Where rows or tokens are removed, the step is run on the others, and that is the new record;
    loss and gradient norm of the original are kept beside it.

    Exit code 0: written, and replayed to the same bits. 1: it replays to others. 2: not written.
    """
    from areal_debug.replay.ranks import refuse_damage
    from recorder import open_record
    from recorder.storage import location_of
    from replayer.bug.cut_request import CutRequest, check_cut

    request = CutRequest(record, step, "", symptom, model, max_seconds)
    opened = open_record(record)
    check_cut(opened, request)
    announce(f"cutting step {step} of {record}")
    from recorder.archive.pack import archive_record, check_destination  # imports zarr

    check_destination(location_of(destination), force)
    refuse_damage(record, len(opened.steps))
    with tempfile.TemporaryDirectory(prefix="areal-debug-cut-") as scratch:
        folder = Path(scratch) / "record"
        report = run_cut(replace(request, folder=str(folder)), opened.header.world_size, as_json)
        archived = archive_record(folder, destination, force)
    report |= {"to": destination, "size_bytes": archived.archive_bytes}
    has_calls = any(name.startswith("calls-") for name in opened.step(step).manifest.files)
    report["lacks_calls"] = has_calls and report["cut"]["kept"] is not None
    has_outcome = report["cut"]["error"] is None
    if not no_check and has_outcome:
        report["replays"] = replays_to_same_bits(destination, step, opened.header.world_size)
    print_answer(report, report_of_cut(report), as_json)
    raise SystemExit(130 if report["interrupted"] else 1 if report.get("replays") is False else 0)


def run_cut(request: "CutRequest", num_ranks: int, as_json: bool) -> dict[str, Any]:
    """Cut on the ranks of this machine; return the report.

    Ends the command with the ranks' exit code if they fail. An interrupt ends the reduction: the
    ranks write the best so far, and the report says so.
    """
    from areal_debug.replay.ranks import replay_ranks, task

    logs = Path(request.folder).parent
    file = logs / "report.json"
    hidden = as_json or is_quiet()
    environment = {REPORT_FILE: str(file)} | ({QUIET: "1"} if hidden else {})
    interrupted = False
    try:
        with replay_ranks() as ranks:
            code = ranks.run(task("cut", **asdict(request)), num_ranks, environment, logs / "ranks.log")
    except SystemExit as ended:
        interrupted, code = True, int(ended.code or 0)
    if not file.exists():
        raise SystemExit(code if interrupted else min(code or 1, 2))
    return read_report(file) | {"interrupted": interrupted}


def replays_to_same_bits(destination: str, step: int, num_ranks: int) -> bool:
    from areal_debug.replay.ranks import replay_ranks, run_once
    from replayer.request import Request

    note("replaying the file once")
    with replay_ranks() as ranks:
        return run_once(ranks, Request(destination, step, step), num_ranks, quiet=True).identical


def report_of_cut(report: dict[str, Any]) -> Report:
    """Return what was written, what it shows, and whether it replays."""
    cut, lines = report["cut"], []
    is_part = cut["kept"] is not None
    kept = f", of {cut['num_rows']:,} rows and {cut['num_tokens']:,} tokens" if is_part else ""
    size = f"{count(report['rows'], 'row')}, {count(report['tokens'], 'token')}{kept}"
    if report["lacks_calls"]:
        lines.append("the calls of agents are left out: a cut of the whole step has them")
    if cut["symptom"] is not None:
        is_minimal = report["is_minimal"]
        ended = "no single row or token can be left out" if is_minimal else "stopped before it was minimal"
        lines.append(
            f"{cut['symptom']}: {ended}, after {report['num_runs']} runs in {report['seconds']:.1f} s"
        )
    if cut["error"] is not None:
        lines.append(f"the step ends with {cut['error']}")
    elif is_part:
        now, original = numbers_of(report["numbers"]), numbers_of(cut["numbers"])
        lines.append(f"expected now: {now}; in the original: {original}")
        lines.append("advantages are computed from the rows that are left")
    replays = report.get("replays")
    if replays is not None:
        lines.append(f"it replays to {'the same' if replays else 'other'} bits")
    level: Level = "" if replays is None else "good" if replays else "bad"
    sentence = f"step {cut['step']}, {size}; {format_bytes(report['size_bytes'])}"
    return Report(report["to"], sentence, level, [*lines, f"next: areal-debug replay {report['to']}"])
