"""An agent's calls in `record show`: what was asked and answered, by which tool."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.text import Text

from areal_core.safety.printable import printable_block
from areal_debug.render import count, format_number, styled

if TYPE_CHECKING:
    from recorder.conversations import Conversation, Part

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
