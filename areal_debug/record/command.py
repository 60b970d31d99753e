"""`areal-debug record`: list, show, verify, archive, import and export records."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_debug.cli import Verb, VerbGroup, json_option, step_option
from areal_debug.record import render
from areal_debug.record.decode import load_decoder
from areal_debug.render import console, errors_as_sentences, fail, print_json, with_progress

if TYPE_CHECKING:
    from recorder import RecordedStep
    from recorder.samples import Sample


@click.group(
    cls=VerbGroup,
    example="areal-debug record ls runs/record\nareal-debug record show runs/record --step 3",
    lazy={
        "archive": "record.archive:archive",
        "extract": "record.archive:extract",
        "import": "record.transfer:import_record",
        "export": "record.transfer:export",
    },
)
def command() -> None:
    """List, show and verify records; archive, import and export them."""


record_argument = click.argument("record", type=click.Path(path_type=Path))


@command.command(cls=Verb, short_help="List a run and its steps", example="areal-debug record ls runs/record")
@record_argument
@click.option(
    "--all",
    "all_steps",
    is_flag=True,
    help=f"List every step, also of more than {render.MAX_LINES}.",
)
@json_option
@errors_as_sentences
def ls(record: Path, all_steps: bool, as_json: bool) -> None:
    """List the run and its steps."""
    from recorder import open_record
    from recorder.reader import summarise_steps

    opened = open_record(record)
    summaries = with_progress("reading steps", len(opened.steps), lambda tick: summarise_steps(opened, tick))
    if as_json:
        print_json(
            {
                "record": str(record),
                "header": asdict(opened.header),
                "steps": [asdict(summary) for summary in summaries],
                "uncommitted": opened.uncommitted,
                "gaps": asdict(opened.gaps),
            }
        )
    else:
        render.print_listing(opened, summaries, len(summaries) if all_steps else render.MAX_LINES)


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
@json_option
@errors_as_sentences
def show(
    record: Path,
    step: int | None,
    rank: int,
    row: int | None,
    prompt_id: int | None,
    tokens: bool,
    as_json: bool,
) -> None:
    """Show decoded text, each token coloured by its logprob, tokens outside the loss mask dim."""
    from recorder import open_record

    if row is not None and prompt_id is not None:
        fail("--sample and --prompt-id exclude each other: give one of them")
    opened = open_record(record)
    if step is None and not opened.steps:
        fail(f"{record} holds no committed step: nothing to show")
    recorded = opened.step(opened.steps[-1] if step is None else step)
    decode = load_decoder(opened)
    samples = select_samples(recorded, rank, row, prompt_id, decode)
    if as_json:
        print_json([asdict(sample) for sample in samples])
        return
    for sample in samples:
        text = None if decode else recorded.text(sample.rank)
        render.print_sample(sample, tokens, text)
    render.print_legend()
    if row is None and prompt_id is None:
        console().print(
            f"one of {recorded.num_rows(rank)} rows of this rank: --sample I or --prompt-id P shows others",
            style="dim",
        )


@command.command(
    cls=Verb,
    short_help="Check every byte of a record against its checksum",
    example="areal-debug record verify runs/record",
)
@record_argument
@json_option
@errors_as_sentences
def verify(record: Path, as_json: bool) -> None:
    """Check every byte. Exit code 1: a file or tensor is damaged, missing or foreign."""
    from recorder import verify as verify_record
    from recorder.reader import open_storage, step_folders

    num_steps = len(step_folders(open_storage(record)))
    report = with_progress("verifying", num_steps, lambda tick: verify_record(record, tick))
    if as_json:
        print_json({"record": str(record), "intact": report.intact, **asdict(report)})
    else:
        render.print_verification(report)
    raise SystemExit(0 if report.intact else 1)


def select_samples(
    step: "RecordedStep",
    rank: int,
    row: int | None,
    prompt_id: int | None,
    decode: Callable[[list[int]], str] | None,
) -> list["Sample"]:
    """Return the requested rows: one, all answers to a prompt, or by default the rank's first."""
    from recorder.errors import StepNotRecorded
    from recorder.samples import read_samples, rows_of_prompt

    if prompt_id is not None:
        ranks = range(step.manifest.num_ranks)
        chosen = {rank: rows_of_prompt(step, rank, prompt_id) for rank in ranks}
        if not any(chosen.values()):
            raise StepNotRecorded(
                f"step {step.manifest.step} has no row with prompt_id {prompt_id}: try another step"
            )
        return [sample for rank in ranks for sample in read_samples(step, rank, chosen[rank], decode)]
    return read_samples(step, rank, [row or 0], decode)
