"""`areal-debug record`: list, show, verify, archive, import and export records."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_debug.cli import Verb, VerbGroup, json_option, spread_options, step_option
from areal_debug.confined import ANYWHERE, describes_limits, reads_untrusted
from areal_debug.record import render
from areal_debug.record.decode import load_decoder
from areal_debug.render import console, errors_as_sentences, fail, print_json, with_progress

if TYPE_CHECKING:
    from areal_core.rollout.judge_journal import JudgeCall
    from recorder import RecordedStep
    from recorder.samples import Sample


@click.group(
    cls=VerbGroup,
    example="areal-debug record ls runs/record\nareal-debug record show runs/record --step 3",
    lazy={
        "archive": "record.archive:archive",
        "cut": "record.cut:cut",
        "extract": "record.archive:extract",
        "import": "record.transfer:import_record",
        "export": "record.transfer:export",
        "redact": "record.redact:redact",
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
    help=f"List every step, also of more than {render.MAX_LINES}.",
)
@json_option
@reads_untrusted("record")
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
@click.option("--in-full", is_flag=True, help="Of agents and judges: long messages to their end.")
@click.option(
    "--judge",
    "journal",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Journal of the run's judge: also show its calls.",
)
@json_option
@reads_untrusted("record", reads=ANYWHERE)
@errors_as_sentences
def show(
    record: Path,
    step: int | None,
    rank: int,
    row: int | None,
    prompt_id: int | None,
    tokens: bool,
    in_full: bool,
    journal: Path | None,
    as_json: bool,
) -> None:
    """Show decoded text, each token coloured by its logprob, tokens outside the loss mask dim; of
    an agent's row also its calls with tool calls and results.
    """
    from areal_debug.record.calls_text import document_of
    from recorder import open_record
    from recorder.agents.conversations import conversations

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
    judged = [judge_calls(journal, sample) for sample in samples]
    if as_json:
        print_json(
            [
                asdict(sample) | {"conversation": document_of(one), "judge": [asdict(call) for call in judge]}
                for sample, one, judge in zip(samples, found, judged, strict=True)
            ]
        )
        return
    for sample, conversation, judge in zip(samples, found, judged, strict=True):
        text = None if decode else recorded.text(sample.rank)
        render.print_sample(sample, tokens, text, conversation, in_full)
        if journal is not None:
            render.print_judge(judge, in_full)
    render.print_legend()
    render.print_not_recorded(recorded)
    if row is None and prompt_id is None:
        console().print(
            f"one of {recorded.num_rows(rank)} rows of this rank: --sample I or --prompt-id P shows others",
            style="dim",
        )


@command.command(
    cls=Verb,
    short_help="Check every byte of a record, and who signed it",
    example="areal-debug record verify runs/record --signed-by ~/.ssh/id_ed25519.pub\n"
    "areal-debug record verify runs/*/record --on ray",
)
@records_argument
@click.option(
    "--signed-by",
    metavar="KEY",
    help="Public ssh key, its file, or an allowed_signers file: also check the signature, and each file against it.",
)
@click.option("--facts", "facts_of", hidden=True)
@spread_options
@json_option
@describes_limits
@errors_as_sentences
def verify(
    records: tuple[Path, ...],
    signed_by: str | None,
    facts_of: str | None,
    place: str | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """Check every byte, and that the files of all steps agree. Exit code 1: a file or tensor is
    damaged, missing, foreign or contradicts another, or is not as it was signed.

    Several records have a line each. With --on ray, one record is divided by its steps.
    """
    from areal_debug.record.step_facts import facts_of_steps, print_facts
    from recorder.errors import BadSignature
    from recorder.integrity.signature import signed_list
    from recorder.reader import open_storage

    if len(records) > 1:
        from areal_debug.spread.records import record_tasks
        from areal_debug.spread.render import report_tasks

        tasks = record_tasks(records, lambda name: {"records": (name,)})
        report_tasks("record", tasks, place, workers, verified_columns, as_json)
    [record] = records
    signed = None
    if signed_by is not None:  # ssh-keygen is a program, which a confined process cannot start
        try:
            signed = signed_list(open_storage(record), signed_by)
        except BadSignature as error:
            fail(str(error), code=1)
    if facts_of is not None:
        print_facts(record=record, step_range=facts_of)
        return
    spread = place is not None or workers is not None
    facts = facts_of_steps(record, place, workers) if spread else {}
    verify_confined(record=record, signed=signed, facts=facts, as_json=as_json)


def verified_columns(report: dict[str, Any]) -> dict[str, str]:
    problems = report["problems"]
    first = f"{problems[0]['file']}: {problems[0]['what']}" if problems else "-"
    return {"steps": str(len(report["steps_ok"])), "problems": str(len(problems)), "first": first}


@reads_untrusted("record")
@errors_as_sentences
def verify_confined(
    record: Path, signed: tuple[str, bytes] | None, facts: dict[str, Any], as_json: bool
) -> None:
    """Check a record, in a confined child; `signed` is what `signed_list` returned.

    `facts` are those of steps that were checked already.
    """
    from recorder import verify as verify_record
    from recorder.integrity.signature import changes_since
    from recorder.reader import open_storage
    from recorder.verify import parse_facts

    storage = open_storage(record)
    num_steps = len(storage.names("steps"))
    checked = {int(step): parse_facts(document) for step, document in facts.items()}
    report = with_progress("verifying", num_steps, lambda tick: verify_record(record, tick, checked))
    changes = None if signed is None else changes_since(storage, *signed)
    if as_json:
        facts = {"record": str(record), "intact": report.intact, **asdict(report)}
        print_json(facts | ({} if changes is None else {"signed": asdict(changes)}))
    else:
        render.print_verification(report)
        if changes is not None:
            render.print_signed(changes)
    raise SystemExit(0 if report.intact and (changes is None or changes.unchanged) else 1)


@command.command(
    cls=Verb,
    short_help="Sign a record with an ssh key",
    example="areal-debug record sign runs/record --key ~/.ssh/id_ed25519",
)
@record_argument
@click.option("--key", type=click.Path(path_type=Path), required=True, help="Private ssh key.")
@json_option
@errors_as_sentences
def sign(record: Path, key: Path, as_json: bool) -> None:
    """Sign the sha256 of every file of RECORD with ssh-keygen: signed.json and signed.json.sig.

    The record must be intact. Signing again replaces the signature.
    """
    from recorder.integrity.signature import sign_record

    num_files = sign_record(record, key)
    if as_json:
        print_json({"record": str(record), "num_files": num_files})
    else:
        console().print(f"{num_files} files signed: `areal-debug record verify --signed-by KEY` checks them")


def judge_calls(journal: Path | None, sample: "Sample") -> "list[JudgeCall]":
    from areal_core.rollout.judge_journal import JournalReader

    if journal is None or sample.prompt_id is None:
        return []
    return JournalReader(journal).of_sample(sample.prompt_id, sample.sample_id)


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
        ranks = range(step.manifest.num_ranks)
        chosen = {rank: rows_of_prompt(step, rank, prompt_id) for rank in ranks}
        if not any(chosen.values()):
            raise StepNotRecorded(
                f"step {step.manifest.step} has no row with prompt_id {prompt_id}: try another step"
            )
        return [sample for rank in ranks for sample in read_samples(step, rank, chosen[rank], decode)]
    return read_samples(step, rank, [row or 0], decode)
