"""What a record says: its steps, a row with its calls and coloured tokens, its verification."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table as RichTable
from rich.text import Text

from areal_core.safety.printable import printable_block
from areal_core.safety.secrets import num_masked
from areal_debug.render import console, count, format_bytes, format_number, sparkline, styled
from areal_debug.report.model import Block, Facts, Report, Row, Table, rows_of

if TYPE_CHECKING:
    from recorder import Record, RecordedStep, RecordHeader, VerifyReport
    from recorder.conversations import Conversation, Part
    from recorder.header import Gaps
    from recorder.reader import StepSummary
    from recorder.samples import Branch, Sample, Token

MOST_CHARACTERS = 600  # of a message
WIDTH = 12  # of the names beside messages


def lines_of_conversation(conversation: "Conversation", in_full: bool) -> Iterator[Text]:
    """Yield the calls of a row with messages, tool calls and results; those that failed in red."""
    transcript = conversation.transcript
    failure = f", failed by the model: {transcript.failure}" if transcript.failure else ""
    calls = count(len(conversation.calls), "call")
    yield styled("[bold]{}[/bold] of agent {}{}", calls, transcript.agent.name, failure)
    for call in conversation.calls:
        after = "" if call.after is None else f", after call {call.after}"
        reward = "" if call.reward is None else f", reward {format_number(call.reward)}"
        yield styled("[cyan]call {}[/cyan]{}, finished by {}{}", call.turn, after, call.finish, reward)
        for part in conversation.parts(call):
            yield line_of(part, in_full)
    if missing := sum(use.result is None for use in conversation.tool_uses):
        yield styled("[dim]no result in this row: {}[/dim]", count(missing, "tool call"))


def line_of(part: "Part", in_full: bool) -> Text:
    """Return what a call adds, beside its role or kind."""
    if part.kind == "tool_call":
        return beside("tool call", f"{part.name}({part.text})", in_full, "yellow")
    if part.kind == "result":
        word = "failed" if part.failed else "returned"
        return beside(f"{part.name} {word}", part.text, in_full, "red" if part.failed else "")
    name = part.name if part.kind == "message" else part.kind
    return beside(name, part.text, in_full, "" if part.kind == "answer" else "dim")


def beside(name: str, text: str, in_full: bool, style: str) -> Text:
    """Return a text beside its name; of a long one the beginning, and how much is left out."""
    shown = text if in_full else text[:MOST_CHARACTERS]
    block = printable_block(shown).replace("\n", "\n" + " " * (WIDTH + 4))
    more = f" ... {len(text) - len(shown):,} more characters" if len(shown) < len(text) else ""
    return Text.assemble((f"  {printable_block(name):<{WIDTH}}  ", "dim"), (block, style), (more, "dim"))


def document_of(conversation: "Conversation | None") -> dict[str, Any] | None:
    """Return the calls of a row as JSON types; None without any."""
    if conversation is None:
        return None
    return {
        "agent": asdict(conversation.transcript.agent),
        "data": conversation.transcript.data,
        "failure": conversation.transcript.failure,
        "calls": [asdict(call) for call in conversation.calls],
        "tool_calls": [asdict(use) for use in conversation.tool_uses],
    }


MAX_LINES = 40
UNKNOWN = "?"
FINISH_REASONS = ("stop", "length", "abort")
# lowest probability of each band, its colour, and its label in the legend
BANDS = (
    (0.9, "green", "90 % and more"),
    (0.5, "cyan", "50 to 90 %"),
    (0.1, "yellow", "10 to 50 %"),
    (0.01, "magenta", "1 to 10 %"),
    (0.0, "bold red", "below 1 %"),
)


def report_of_listing(record: "Record", summaries: "list[StepSummary]", max_lines: int) -> Report:
    """Return the run in a few lines, one line a step, and what is missing.

    Of more than `max_lines` steps, the first and the last are listed.
    """
    header, num_masks = record.header, num_masked(record.header.config)
    num_tokens = sum(summary.num_tokens for summary in summaries)
    size_bytes = sum(summary.size_bytes for summary in summaries)
    every = f", every {header.recording.every} steps" if header.recording.every > 1 else ""
    chosen = header.recording.steps
    steps = every if chosen is None else f", steps {', '.join(map(str, chosen))}"
    rewards = [math.nan if s.mean_reward is None else s.mean_reward for s in summaries]
    facts = {
        "recorded": header.created,
        **({"trainer": trainer_of(header)} if header.trainer else {}),
        "model": header.model["path"],
        "allocation": header.allocation,
        "data-parallel ranks": header.num_ranks,
        "scope": header.recording.scope + steps,
        "torch": header.environment["torch"]["build"],
        "code": header.environment["code"]["commit"],
        "masked": f"{count(num_masks, 'value')} of the config" if num_masks else None,
        "mean reward": sparkline(rewards),
        **({"not known": describe_unknown(summaries)} if any(s.num_unknown for s in summaries) else {}),
    }
    cells = [step_cells(summary) for summary in summaries]
    missing = describe_gaps(record.gaps)
    missing += [f"step {step} was not finished and is not in the record" for step in record.uncommitted]
    if (num_left_out := len(cells) - max_lines) > 0:
        head = max_lines // 2
        cells[head : head + num_left_out] = [("...",)]
        missing.insert(0, f"{num_left_out:,} steps left out: --all lists them")
    blocks: list[Block] = [
        Facts([Row(name, "-" if value is None else str(value)) for name, value in facts.items()]),
        Table(("step>", "weights>", "rows>", "tokens>", "size>", "mean reward>"), cells),
        *missing,
    ]
    return Report(
        f"{len(summaries)} steps, {num_tokens:,} tokens, {format_bytes(size_bytes)}", "", "", blocks
    )


def describe_gaps(gaps: "Gaps") -> list[str]:
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
    no_reward = UNKNOWN if summary.num_rows else "-"
    return (
        str(summary.step),
        str(summary.version),
        str(summary.num_rows),
        f"{summary.num_tokens:,}",
        format_bytes(summary.size_bytes),
        no_reward if summary.mean_reward is None else f"{summary.mean_reward:.4f}",
    )


def trainer_of(header: "RecordHeader") -> str:
    if "imported" in header.environment:
        return f"imported from {header.trainer}"
    version = header.environment["trainer"].get("version")
    return f"{header.trainer} {version}" if version else f"{header.trainer}"


def describe_unknown(summaries: "list[StepSummary]") -> str:
    """Return `logprobs, rewards of 3 of 96 rows`: what is not known, and in how many rows."""
    total = sum(summary.num_rows for summary in summaries)
    counts: Counter[str] = Counter()
    for summary in summaries:
        counts.update(summary.num_unknown)
    return ", ".join(
        key if count == total else f"{key} of {count} of {total} rows" for key, count in counts.items()
    )


def print_sample(
    sample: "Sample",
    as_table: bool,
    recorded_text: list[dict[str, Any]] | None,
    conversation: "Conversation | None" = None,
    in_full: bool = False,
) -> None:
    """Print a row under its heading: its calls, then coloured text or one line per token."""
    out = console()
    out.print(heading(sample))
    for number, image in enumerate(sample.images):
        size = format_bytes(image.size_bytes)
        out.print(styled("[dim]image {}: {}, {}, images/{}[/dim]", number, image.kind, size, image.sha256))
    for line in () if conversation is None else lines_of_conversation(conversation, in_full):
        out.print(line)
    out.print(token_table(sample.tokens) if as_table and sample.tokens else text_of(sample, recorded_text))


def heading(sample: "Sample") -> Text:
    """Return the identity of a row, its reward and how it finished."""
    name = f"step {sample.step}, rank {sample.rank}, row {sample.row}"
    reason = UNKNOWN if sample.finish_reason is None else FINISH_REASONS[sample.finish_reason]
    facts = (
        f"prompt {UNKNOWN if sample.prompt_id is None else sample.prompt_id}, sample {sample.sample_id}",
        f"reward {known_number(sample.reward)}",
        *(f"{name} {known_number(score)}" for name, score in sample.scores.items()),
        f"finished by {reason}",
        *(("tokens unknown",) if sample.tokens is None else token_facts(sample.tokens)),
        *(() if sample.place is None else describe_place(sample.place)),
    )
    return Text(name, style="bold") + Text("  " + "  ".join(facts), style="dim")


def known_number(value: float | None) -> str:
    return UNKNOWN if value is None else format_number(value)


def token_facts(tokens: "tuple[Token, ...]") -> tuple[str, str]:
    trained = [token for token in tokens if token.trained is not False]
    known = [token.logprob for token in trained if token.logprob is not None]
    count = UNKNOWN if any(token.trained is None for token in tokens) else len(trained)
    mean = format_number(sum(known) / len(known)) if known else UNKNOWN if trained else "-"
    some = f" of {len(known)} known" if 0 < len(known) < len(trained) else ""
    return f"{count} of {len(tokens)} tokens in the loss mask", f"mean logprob {mean}{some}"


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
    """Return dim for a token outside the loss mask, else the colour of its probability's band.

    It has no colour where either is not known.
    """
    if token.trained is False:
        return "dim"
    if token.trained is None or token.logprob is None:
        return ""
    probability = math.exp(min(token.logprob, 0))
    return next((colour for lowest, colour, _ in BANDS if probability >= lowest), "reverse red")


def text_of(sample: "Sample", recorded: list[dict[str, Any]] | None) -> Text:
    """Return the row's text in colours; without tokenizer or tokens the recorded text, plain."""
    text = sample.text
    if recorded is not None:
        text = recorded[sample.row]["prompt"], recorded[sample.row]["completion"]
    if text is not None:
        return Text(printable_block(text[0]), style="dim") + Text(printable_block(text[1]))
    tokens = sample.tokens or ()
    return Text.assemble(*((printable_block(token.text), style_of(token)) for token in tokens))


def token_table(tokens: "tuple[Token, ...]") -> RichTable:
    table = RichTable(box=None, pad_edge=False, header_style="dim")
    for name in ("position", "id", "loss mask", "logprob", "version"):
        table.add_column(name, justify="right")
    table.add_column("text")
    for position, token in enumerate(tokens):
        trained = {True: "yes", False: "no", None: UNKNOWN}[token.trained]
        logprob = UNKNOWN if token.logprob is None else f"{token.logprob:.6f}"
        version = UNKNOWN if token.version is None else str(token.version)
        numbers = ("-", "-") if token.trained is False else (logprob, version)
        text = Text(json.dumps(token.text, ensure_ascii=False), style=style_of(token))
        number = UNKNOWN if token.id is None else str(token.id)
        table.add_row(str(position), number, trained, *numbers, text)
    return table


def print_not_recorded(step: "RecordedStep") -> None:
    plans = [name for name in step.manifest.files if name.startswith("plan-")]
    names = step.plan(0).details.get("not_recorded") if plans else None
    if names:
        console().print(styled("not recorded by its trainer: {}", ", ".join(map(str, names))), style="dim")


def legend() -> Text:
    bands = [(f"{words}  ", colour) for _, colour, words in BANDS]
    return Text.assemble("probability when sampled: ", *bands, ("not in the loss mask", "dim"))


def report_of_verification(report: "VerifyReport") -> Report:
    """Return the verdict, who writes the record, each problem with its place, and what to do."""
    notes = [] if report.written_by is None else [f"being written by {report.written_by}"]
    num_intact = len(report.steps_ok)
    if report.intact and not num_intact:
        return Report(
            "inconclusive", "the record holds no step yet: nothing was verified", "unsure", notes=notes
        )
    if report.intact:
        if report.end is None:
            notes.append("it has no end mark: steps that are missing after the last one are not noticed")
        return Report("intact", f"every byte of {num_intact} steps is as written", "good", notes=notes)
    rows = rows_of("problem", list(map(str, report.problems)))
    if report.steps_missing:
        rows.append(Row("missing", f"steps {', '.join(map(str, report.steps_missing))}"))
    advice = (
        "intact steps can still be read and replayed; copy the others again from where they were recorded"
    )
    verdict = f"{count(len(report.problems), 'problem')}, {num_intact} steps are intact"
    return Report(verdict, "", "bad", [Facts([*rows, Row("next", advice)])], notes)
