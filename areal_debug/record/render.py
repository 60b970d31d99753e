"""Print the reports of `areal-debug record`: a listing, coloured text, a verdict on the bytes."""

import json
import math
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from areal_core.safety.printable import printable_block
from areal_core.safety.secrets import num_masked
from areal_debug.render import console, format_bytes, format_number, sparkline, styled

if TYPE_CHECKING:
    from recorder import Record, Recording, VerifyReport
    from recorder.header import Gaps
    from recorder.integrity.signature import Signed
    from recorder.reader import StepSummary
    from recorder.samples import Branch, Sample, Token

MAX_LINES = 40
FINISH_REASONS = ("stop", "length", "abort")
# lowest probability of each band, its colour, and its label in the legend
BANDS = (
    (0.9, "green", "90 % and more"),
    (0.5, "cyan", "50 to 90 %"),
    (0.1, "yellow", "10 to 50 %"),
    (0.01, "magenta", "1 to 10 %"),
    (0.0, "bold red", "below 1 %"),
)


def print_listing(record: "Record", summaries: "list[StepSummary]", max_lines: int) -> None:
    """Print the run in a few lines, then one line per step.

    Of more than `max_lines` steps, the first and the last are printed.
    """
    out, header = console(), record.header
    num_tokens = sum(summary.num_tokens for summary in summaries)
    size_bytes = sum(summary.size_bytes for summary in summaries)
    out.print(
        styled("{} steps, {:,} tokens, {}", len(summaries), num_tokens, format_bytes(size_bytes)),
        style="bold",
    )
    facts = {
        "recorded": header.created,
        "model": header.model["path"],
        "allocation": header.allocation,
        "data-parallel ranks": header.num_ranks,
        "scope": describe_recording(header.recording),
        "torch": header.environment["torch"]["build"],
        "code": header.environment["code"]["commit"],
        "masked": f"{num_masked(header.config)} values of the config" if num_masked(header.config) else None,
        "mean reward": sparkline([s.mean_reward for s in summaries if s.mean_reward is not None]),
    }
    for name, value in facts.items():
        out.print(styled("[dim]{:<20}[/dim]{}", name, value if value is not None else "-"))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("step", "weights", "rows", "tokens", "size", "mean reward"):
        table.add_column(heading, justify="right")
    num_left_out = max(0, len(summaries) - max_lines)
    head = max_lines // 2 if num_left_out else len(summaries)
    for summary in summaries[:head]:
        table.add_row(*step_cells(summary))
    if num_left_out:
        table.add_row("...")
    for summary in summaries[head + num_left_out :]:
        table.add_row(*step_cells(summary))
    out.print(table)
    if num_left_out:
        out.print(styled("{:,} steps left out: --all lists them", num_left_out), style="dim")
    for sentence in describe_gaps(record.gaps):
        out.print(sentence, style="yellow")
    for step in record.uncommitted:
        out.print(styled("step {} was not finished and is not in the record", step), style="yellow")


def describe_recording(recording: "Recording") -> str:
    """Return `plan`, `full, every 10 steps`, or `rollout, steps 3, 5`."""
    if recording.steps is not None:
        return f"{recording.scope}, steps {', '.join(map(str, recording.steps))}"
    return recording.scope + (f", every {recording.every} steps" if recording.every > 1 else "")


def describe_gaps(gaps: "Gaps") -> list[str]:
    """Return one sentence per reason for which steps are missing."""
    num_removed = sum(last - first + 1 for first, last in gaps.removed)
    sentences = []
    if num_removed:
        first, last = gaps.removed[0][0], gaps.removed[-1][1]
        sentences.append(
            f"{num_removed} steps from {first} to {last} were removed to keep the record within its limits"
        )
    if gaps.dropped:
        steps = ", ".join(map(str, gaps.dropped[:MAX_LINES]))
        sentences.append(
            f"{len(gaps.dropped)} steps were dropped because the disk was slower than the run: {steps}"
        )
    if gaps.lost:
        steps = ", ".join(map(str, gaps.lost[:MAX_LINES]))
        sentences.append(f"{len(gaps.lost)} steps were not written when the run was cut off: {steps}")
    return sentences


def step_cells(summary: "StepSummary") -> tuple[str, ...]:
    """Return a step as a row of the listing."""
    return (
        str(summary.step),
        str(summary.version),
        str(summary.num_rows),
        f"{summary.num_tokens:,}",
        format_bytes(summary.size_bytes),
        "-" if summary.mean_reward is None else f"{summary.mean_reward:.4f}",
    )


def print_sample(sample: "Sample", as_table: bool, recorded_text: list[dict[str, Any]] | None) -> None:
    """Print a row under its heading, as coloured text or as one line per token."""
    out = console()
    out.print(heading(sample))
    out.print(token_table(sample) if as_table else text_of(sample, recorded_text))


def heading(sample: "Sample") -> Text:
    """Return the identity of a row, its reward and how it finished."""
    trained = [token.logprob for token in sample.tokens if token.trained]
    mean = format_number(sum(trained) / len(trained)) if trained else "-"
    name = f"step {sample.step}, rank {sample.rank}, row {sample.row}"
    facts = (
        f"prompt {sample.prompt_id}, sample {sample.sample_id}",
        f"reward {format_number(sample.reward)}",
        f"finished by {FINISH_REASONS[sample.finish_reason]}",
        f"{len(trained)} of {len(sample.tokens)} tokens in the loss mask",
        f"mean logprob {mean}",
        *(() if sample.place is None else describe_place(sample.place)),
    )
    return Text(name, style="bold") + Text("  " + "  ".join(facts), style="dim")


def describe_place(place: "Branch") -> list[str]:
    """Return the episode and calls of a row, how they continue earlier ones, and a failure."""
    from areal_core.agent.conversation import BRANCHES, BROKEN
    from areal_core.agent.failures import FAILURES

    branch, failure = BRANCHES[place.branch], FAILURES[place.failure]
    after = f" after turn {place.parent_turn}" if place.parent_turn >= 0 else ""
    plural = "" if len(place.turns) == 1 else "s"
    facts = [f"episode {place.episode}, turn{plural} {', '.join(map(str, place.turns))}"]
    facts += [f"{BROKEN.get(branch, branch)}{after}"] if branch != "root" else []
    return facts + ([f"failed by the model: {failure}"] if failure else [])


def style_of(token: "Token") -> str:
    """Return dim for a token outside the loss mask, else the colour of its probability's band."""
    if not token.trained:
        return "dim"
    return next(
        (colour for lowest, colour, _ in BANDS if math.exp(min(token.logprob, 0)) >= lowest), "reverse red"
    )


def text_of(sample: "Sample", recorded: list[dict[str, Any]] | None) -> Text:
    """Return the row's text in colours; without a tokenizer the recorded text, uncoloured."""
    if recorded is not None:
        line = recorded[sample.row]
        return Text(printable_block(line["prompt"]), style="dim") + Text(printable_block(line["completion"]))
    return Text.assemble(*((printable_block(token.text), style_of(token)) for token in sample.tokens))


def token_table(sample: "Sample") -> Table:
    """Make a table of tokens with their numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("position", "id", "loss mask", "logprob", "version"):
        table.add_column(name, justify="right")
    table.add_column("text")
    for position, token in enumerate(sample.tokens):
        numbers = (f"{token.logprob:.6f}", str(token.version)) if token.trained else ("-", "-")
        trained = "yes" if token.trained else "no"
        text = Text(json.dumps(token.text, ensure_ascii=False), style=style_of(token))
        table.add_row(str(position), str(token.id), trained, *numbers, text)
    return table


def print_legend() -> None:
    """Print the meaning of the colours."""
    bands = [(f"{words}  ", colour) for _, colour, words in BANDS]
    console().print(Text.assemble("probability when sampled: ", *bands, ("not in the loss mask", "dim")))


def print_verification(report: "VerifyReport") -> None:
    """Print who writes it, the verdict, each problem with its file and tensor, then what to do."""
    out = console()
    if report.written_by is not None:
        out.print(Text(f"being written by {report.written_by}"))
    if report.intact:
        out.print(styled("[green]intact[/green]: every byte of {} steps is as written", len(report.steps_ok)))
        if report.end is None:
            out.print(
                "it has no end mark: steps that are missing after the last one are not noticed", style="dim"
            )
        return
    plural = "" if len(report.problems) == 1 else "s"
    out.print(
        styled(
            "[red]{} problem{}[/red], {} steps are intact", len(report.problems), plural, len(report.steps_ok)
        )
    )
    for problem in report.problems:
        out.print(styled("  {}", problem))
    if report.steps_missing:
        out.print(styled("steps missing: {}", ", ".join(map(str, report.steps_missing))))
    out.print(
        "intact steps can still be read and replayed; copy the others again from where they were recorded"
    )


def print_signed(signed: "Signed") -> None:
    """Print who signed a record, and each file that is not as it was signed."""
    out = console()
    out.print(styled("signed by {}: {} files", signed.signer, signed.num_files))
    for words, names in (("changed", signed.changed), ("added", signed.added), ("removed", signed.removed)):
        for name in names:
            out.print(styled("[red]  {}: {} since it was signed[/red]", name, words))
