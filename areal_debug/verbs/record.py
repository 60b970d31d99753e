"""`areal-debug record`: list, show, verify, archive, import and export records."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_debug.cli import Verb, VerbGroup, json_option, step_option
from areal_debug.confined import ANYWHERE, reads_untrusted
from areal_debug.record.decode import load_decoder
from areal_debug.record.report import (
    MAX_LINES,
    document_of,
    legend,
    print_not_recorded,
    print_sample,
    report_of_listing,
    report_of_verification,
)
from areal_debug.render import console, end_if_damaged, fail, print_json, styled, with_progress
from areal_debug.report.terminal import print_report

if TYPE_CHECKING:
    from recorder import RecordedStep
    from recorder.samples import Sample


@click.group(
    cls=VerbGroup,
    example="areal-debug record ls runs/record\nareal-debug record show runs/record --step 3",
    lazy={
        "archive": "verbs.record_archive:archive",
        "coverage": "verbs.record_seam:coverage",
        "cut": "verbs.record_cut:cut",
        "extract": "verbs.record_archive:extract",
        "import": "verbs.record_transfer:import_record",
        "export": "verbs.record_transfer:export",
        "redact": "verbs.record_redact:redact",
        "seam": "verbs.record_seam:seam",
    },
)
def command() -> None:
    """List, show and verify records; archive, cut, import and export them."""


record_argument = click.argument("record", type=click.Path(path_type=Path))
records_argument = click.argument(
    "records", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="RECORD..."
)


@command.command(cls=Verb, short_help="List a run and its steps", example="areal-debug record ls runs/record")
@record_argument
@click.option(
    "--all",
    "all_steps",
    is_flag=True,
    help=f"List every step, also of more than {MAX_LINES}.",
)
@json_option
@reads_untrusted("record")
def ls(record: Path, all_steps: bool, as_json: bool) -> None:
    """List the run and its steps."""
    from recorder import open_record
    from recorder.reader import Damage, summarise_steps

    damage = Damage()
    opened = open_record(record, damage)
    summaries = with_progress(
        "reading steps", len(opened.steps), lambda tick: summarise_steps(opened, tick, damage)
    )
    if as_json:
        print_json(
            {
                "record": str(record),
                "header": asdict(opened.header),
                "steps": [asdict(summary) for summary in summaries],
                "uncommitted": opened.uncommitted,
                "gaps": asdict(opened.gaps),
                "damaged": list(damage.found),
            }
        )
    else:
        most = len(summaries) if all_steps else MAX_LINES
        print_report(console(), report_of_listing(opened, summaries, most))
    end_if_damaged(damage.found)


@command.command(
    cls=Verb,
    short_help="Show a step's text, each token coloured by its logprob",
    example="areal-debug record show runs/record --step 3 --prompt-id 17",
)
@record_argument
@step_option("the last")
@click.option("--rank", type=int, default=0, show_default=True, help="Data-parallel rank.")
@click.option("--sample", "row", type=int, metavar="I", help="One row of that rank's batch.")
@click.option("--prompt-id", type=int, metavar="P", help="All answers to one prompt, from every rank.")
@click.option("--tokens", is_flag=True, help="One line per token, with its numbers.")
@click.option("--in-full", is_flag=True, help="Show long messages of agents to their end.")
@json_option
@reads_untrusted("record", reads=ANYWHERE)
def show(
    record: Path,
    step: int | None,
    rank: int,
    row: int | None,
    prompt_id: int | None,
    tokens: bool,
    in_full: bool,
    as_json: bool,
) -> None:
    """Show decoded text, each token coloured by its logprob, tokens outside the loss mask dim; of
    an agent's row also its calls with tool calls and results.
    """
    from recorder import open_record
    from recorder.conversations import conversations

    if row is not None and prompt_id is not None:
        fail("--sample and --prompt-id exclude each other: give one of them")
    opened = open_record(record)
    if step is None and not opened.steps:
        fail(f"{record} holds no committed step: nothing to show")
    recorded = opened.step(opened.steps[-1] if step is None else step)
    decode = load_decoder(opened)
    samples = select_samples(recorded, rank, row, prompt_id, decode)
    of_rank = {sample.rank: conversations(recorded, sample.rank) for sample in samples}
    found = [None if (rows := of_rank[one.rank]) is None else rows[one.row] for one in samples]
    if as_json:
        print_json(
            [
                asdict(sample) | {"conversation": document_of(one)}
                for sample, one in zip(samples, found, strict=True)
            ]
        )
        return
    for sample, conversation in zip(samples, found, strict=True):
        text = None if decode else recorded.text(sample.rank)
        print_sample(sample, tokens, text, conversation, in_full)
    console().print(legend())
    print_not_recorded(recorded)
    if row is None and prompt_id is None:
        console().print(
            f"one of {recorded.num_rows(rank)} rows of this rank: --sample I or --prompt-id P shows others",
            style="dim",
        )


@command.command(
    cls=Verb, short_help="Check every byte of a record", example="areal-debug record verify runs/record"
)
@records_argument
@json_option
@reads_untrusted("records")
def verify(records: tuple[Path, ...], as_json: bool) -> None:
    """Check every byte, and that the files of all steps agree. Exit code 1: a file or tensor is
    damaged, missing, foreign or contradicts another. 2: a record has no step.
    """
    from recorder import verify as verify_record
    from recorder.reader import open_storage

    reports = {}
    for record in records:
        num_steps = len(open_storage(record).names("steps"))
        reports[record] = with_progress("verifying", num_steps, partial(verify_record, record))
    if as_json:
        facts = [{"record": str(r), "intact": found.intact, **asdict(found)} for r, found in reports.items()]
        print_json(facts[0] if len(facts) == 1 else facts)
    else:
        for record, report in reports.items():
            if len(records) > 1:
                console().print(styled("[bold]{}[/bold]", record))
            print_report(console(), report_of_verification(report))
    if not all(report.intact for report in reports.values()):
        raise SystemExit(1)
    raise SystemExit(0 if all(report.steps_ok for report in reports.values()) else 2)


def select_samples(
    step: "RecordedStep",
    rank: int,
    row: int | None,
    prompt_id: int | None,
    decode: Callable[[list[int]], str] | None,
) -> list["Sample"]:
    from recorder.errors import StepNotRecorded
    from recorder.samples import read_samples, rows_of_prompt

    if prompt_id is not None:
        chosen = {rank: rows_of_prompt(step, rank, prompt_id) for rank in step.ranks}
        if not any(chosen.values()):
            raise StepNotRecorded(
                f"step {step.manifest.step} has no row with prompt_id {prompt_id}: try another step"
            )
        return [sample for rank in step.ranks for sample in read_samples(step, rank, chosen[rank], decode)]
    return read_samples(step, rank, [row or 0], decode)
