"""`areal-debug record`: what is in a record, what it says token by token, and whether its bytes are whole."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text

from areal_debug.render import (
    console,
    errors_as_sentences,
    fail,
    format_bytes,
    format_number,
    print_json,
    sparkline,
    with_progress,
)

if TYPE_CHECKING:
    from recorder import Record, RecordedStep, VerifyReport
    from recorder.samples import Sample, Token

FINISH_REASONS = ("stop", "length", "abort")
# lowest probability of each band, its colour, and its words in the legend
BANDS = (
    (0.9, "green", "90 % and more"),
    (0.5, "cyan", "50 to 90 %"),
    (0.1, "yellow", "10 to 50 %"),
    (0.01, "magenta", "1 to 10 %"),
    (0.0, "bold red", "below 1 %"),
)


@dataclass(frozen=True)
class StepSummary:
    """One line of `record ls`. `mean_reward` is None for a step without rows."""

    step: int
    version: int
    num_rows: int
    num_tokens: int
    size_bytes: int
    mean_reward: float | None


@click.group()
def command() -> None:
    """Look into a record: list its steps, show its text, verify its bytes."""


record_argument = click.argument("record", type=click.Path(path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="The same facts as JSON.")


@command.command()
@record_argument
@json_option
@errors_as_sentences
def ls(record: Path, as_json: bool) -> None:
    """List the run and its steps."""
    from recorder import open_record

    opened = open_record(record)
    summaries = with_progress("reading steps", len(opened.steps), lambda tick: summarise_steps(opened, tick))
    if as_json:
        print_json(
            {
                "record": str(record),
                "header": asdict(opened.header),
                "steps": [asdict(summary) for summary in summaries],
                "uncommitted": opened.uncommitted,
            }
        )
    else:
        print_listing(opened, summaries)


@command.command()
@record_argument
@click.option("--step", type=int, help="The step; the last one unless given.")
@click.option("--rank", type=int, default=0, show_default=True, help="The data-parallel rank.")
@click.option("--sample", "row", type=int, metavar="I", help="One row of that rank's batch.")
@click.option("--prompt-id", type=int, metavar="P", help="All answers to one prompt, from every rank.")
@click.option("--tokens", is_flag=True, help="One line a token, with its numbers.")
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
    """Show decoded text, each token coloured by its logprob, untrained tokens dim."""
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
    out = console()
    for sample in samples:
        text = None if decode else recorded.text(sample.rank)
        out.print(heading(sample))
        out.print(token_table(sample) if tokens else text_of(sample, text))
    out.print(legend())


@command.command()
@record_argument
@json_option
@errors_as_sentences
def verify(record: Path, as_json: bool) -> None:
    """Check every byte; exit with 1 when any file or tensor is damaged, missing or foreign."""
    from recorder import verify as verify_record
    from recorder.reader import step_folders

    report = with_progress("verifying", len(step_folders(record)), lambda tick: verify_record(record, tick))
    if as_json:
        print_json({"record": str(record), "intact": report.intact, **asdict(report)})
    else:
        print_verification(record, report)
    raise SystemExit(0 if report.intact else 1)


def summarise_steps(record: "Record", tick: Callable[[object], None]) -> list[StepSummary]:
    """One summary a committed step, over all ranks; reads step.json and the rewards."""
    summaries = []
    for number in record.steps:
        step = record.step(number)
        ranks = range(step.manifest.num_ranks)
        batches, files = step.manifest.batches.values(), step.manifest.files.values()
        rewards = [reward for rank in ranks for reward in step.batch(rank, ["rewards"])["rewards"].tolist()]
        summaries.append(
            StepSummary(
                step=number,
                version=step.manifest.version,
                num_rows=sum(batch.num_rows for batch in batches),
                num_tokens=sum(batch.num_tokens for batch in batches),
                size_bytes=sum(b.size_bytes for b in batches) + sum(f.size_bytes for f in files),
                mean_reward=sum(rewards) / len(rewards) if rewards else None,
            )
        )
        tick(number)
    return summaries


def print_listing(record: "Record", summaries: list[StepSummary]) -> None:
    """The run in a few lines, then one line a step."""
    out, header = console(), record.header
    num_tokens = sum(summary.num_tokens for summary in summaries)
    size_bytes = sum(summary.size_bytes for summary in summaries)
    out.print(f"{len(summaries)} steps, {num_tokens:,} tokens, {format_bytes(size_bytes)}", style="bold")
    facts = {
        "recorded": header.created,
        "model": header.model["path"],
        "allocation": header.allocation,
        "data-parallel ranks": header.num_ranks,
        "torch": header.environment["torch"]["build"],
        "code": header.environment["code"]["commit"],
        "mean reward": sparkline([s.mean_reward for s in summaries if s.mean_reward is not None]),
    }
    for name, value in facts.items():
        out.print(Text(f"{name:<20}", style="dim") + Text(str(value if value is not None else "-")))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("step", "weights", "rows", "tokens", "size", "mean reward"):
        table.add_column(heading, justify="right")
    for summary in summaries:
        reward = "-" if summary.mean_reward is None else f"{summary.mean_reward:.4f}"
        counts = (summary.step, summary.version, summary.num_rows, f"{summary.num_tokens:,}")
        table.add_row(*map(str, counts), format_bytes(summary.size_bytes), reward)
    out.print(table)
    for step in record.uncommitted:
        out.print(f"step {step} was not finished and is not part of the record", style="yellow")


def load_decoder(record: "Record") -> Callable[[list[int]], str] | None:
    """Decoding with the tokenizer that the record names, or None where its file is gone or another one."""
    identity = record.header.tokenizer or record.header.model
    file = Path(identity["path"]) / "tokenizer.json"
    if not file.is_file() or "tokenizer.json" not in identity["files"]:
        return None
    from tokenizers import Tokenizer

    from recorder.environment import file_identity

    if file_identity(file) != identity["files"]["tokenizer.json"]:
        console(stderr=True).print(f"[yellow]{file} is not the one recorded: showing ids[/yellow]")
        return None
    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def select_samples(
    step: "RecordedStep",
    rank: int,
    row: int | None,
    prompt_id: int | None,
    decode: Callable[[list[int]], str] | None,
) -> list["Sample"]:
    """The rows asked for: one row, all answers to a prompt from every rank, or the rank's first row."""
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


def heading(sample: "Sample") -> Text:
    """Which row this is and how it ended."""
    trained = [token.logprob for token in sample.tokens if token.trained]
    mean = format_number(sum(trained) / len(trained)) if trained else "-"
    name = f"step {sample.step}, rank {sample.rank}, row {sample.row}"
    facts = (
        f"prompt {sample.prompt_id}, sample {sample.sample_id}",
        f"reward {format_number(sample.reward)}",
        f"finished by {FINISH_REASONS[sample.finish_reason]}",
        f"{len(trained)} of {len(sample.tokens)} tokens trained",
        f"mean logprob {mean}",
    )
    return Text(name, style="bold") + Text("  " + "  ".join(facts), style="dim")


def style_of(token: "Token") -> str:
    """Dim where the token is not trained, else the colour of its probability's band."""
    if not token.trained:
        return "dim"
    return next((colour for lowest, colour, _ in BANDS if math.exp(token.logprob) >= lowest), "reverse red")


def text_of(sample: "Sample", recorded: list[dict[str, Any]] | None) -> Text:
    """The row's text in colours; from the recorded text, which has no tokens to colour, where there is no tokenizer."""
    if recorded is not None:
        line = recorded[sample.row]
        return Text(line["prompt"], style="dim") + Text(line["completion"])
    return Text.assemble(*((token.text, style_of(token)) for token in sample.tokens))


def token_table(sample: "Sample") -> Table:
    """One line a token with its numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("position", "id", "trained", "logprob", "version"):
        table.add_column(name, justify="right")
    table.add_column("text")
    for position, token in enumerate(sample.tokens):
        numbers = (f"{token.logprob:.6f}", str(token.version)) if token.trained else ("-", "-")
        trained = "yes" if token.trained else "no"
        text = Text(json.dumps(token.text, ensure_ascii=False), style=style_of(token))
        table.add_row(str(position), str(token.id), trained, *numbers, text)
    return table


def legend() -> Text:
    """What the colours mean."""
    bands = [(f"{words}  ", colour) for _, colour, words in BANDS]
    return Text.assemble("probability when sampled: ", *bands, ("not trained", "dim"))


def print_verification(record: Path, report: "VerifyReport") -> None:
    """The verdict, then each problem with its file and tensor, then what to do."""
    out = console()
    if report.intact:
        out.print(f"[green]intact[/green]: every byte of {len(report.steps_ok)} steps is as it was written")
        return
    out.print(f"[red]{len(report.problems)} problems[/red], {len(report.steps_ok)} steps are intact")
    for problem in report.problems:
        tensor = f", tensor {problem.tensor}" if problem.tensor else ""
        out.print(Text(f"  {problem.file}{tensor}: {problem.what}"))
    if report.steps_missing:
        out.print(f"steps missing: {', '.join(map(str, report.steps_missing))}")
    out.print(
        "intact steps can still be read and replayed; copy the others again from where they were recorded"
    )
