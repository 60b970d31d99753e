"""The calls of agents as the conversation of a row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from recorder.reader import RecordedStep
from recorder.transcripts import RecordedCall, ToolUse, Transcript, text_of, tool_uses


@dataclass(frozen=True)
class Part:
    """What a call adds to a conversation.

    Attributes:
        kind: "message", "reasoning", "tool_call", "result" of a tool, or "answer".
        name: the role of a message, or the tool.
        text: a tool call's arguments; a picture is `[image]`.
        failed: of a result, whether the tool failed; arguments: those that the tool got.
    """

    kind: str
    name: str
    text: str
    failed: bool = False
    arguments: str = ""


@dataclass(frozen=True)
class Conversation:
    """The calls of a row, from the first of its conversation to its last."""

    transcript: Transcript
    calls: tuple[RecordedCall, ...]

    @cached_property
    def tool_uses(self) -> list[ToolUse]:
        """The tool calls of the row with their results."""
        return tool_uses(self.calls)

    @property
    def num_failed(self) -> int:
        """The number of tool calls that failed."""
        return sum(use.failed is True for use in self.tool_uses)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, answers included."""
        return [message for call in self.calls for message in (*call.messages, call.answer)]

    def parts(self, call: RecordedCall) -> list[Part]:
        """Return what a call of the row adds: messages, results of tools, and its answer."""
        uses = iter([use for use in self.tool_uses if use.turn == call.after and use.result is not None])
        found: list[Part] = []
        for message in call.messages:
            use = next(uses, None) if message["role"] == "tool" else None
            if use is None:
                found += message_parts("message", message)
            else:
                found.append(Part("result", use.name, use.result or "", use.failed is True, use.arguments))
        return [*found, *message_parts("answer", call.answer)]

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the last call offered."""
        return offered_tools(self.transcript).get(self.calls[-1].turn, []) if self.calls else []


def conversations(step: RecordedStep, rank: int) -> list[Conversation | None] | None:
    """Return the calls of each row of a rank; None if the calls of agents were not recorded.

    Of a row that is of no recorded episode there are none. Raises DamagedRecord.
    """
    transcripts = step.calls(rank)
    if transcripts is None:
        return None
    if not {"episode", "turns"} <= step.batch_entry(rank)[1].tensors.keys():
        return [None] * step.num_rows(rank)
    arrays = step.batch(rank, ["cu_seqlens", "prompt_id", "episode", "turns"])
    episodes = {(one.prompt_id, one.episode): one for one in transcripts}
    names = zip(arrays["prompt_id"].tolist(), arrays["episode"].tolist(), strict=True)
    found: list[Conversation | None] = []
    for name, (begin, end) in zip(names, pairwise(arrays["cu_seqlens"].tolist()), strict=True):
        transcript, turns = episodes.get(name), arrays["turns"][begin:end]
        last = int(turns.max()) - 1 if len(turns) else -1
        calls = () if transcript is None else calls_before(transcript, last)
        found.append(None if transcript is None else Conversation(transcript, calls))
    return found


def message_parts(kind: str, message: Mapping[str, Any]) -> list[Part]:
    role, text, asked = message["role"], text_of(message), message.get("tool_calls", ())
    reasoning = message.get("reasoning_content")
    return [
        *([Part("reasoning", role, reasoning)] if isinstance(reasoning, str) else []),
        *([Part(kind, role, text)] if text or not asked else []),
        *(Part("tool_call", one["name"], one["arguments"]) for one in asked),
    ]


def calls_before(transcript: Transcript, last: int) -> tuple[RecordedCall, ...]:
    by_turn = {call.turn: call for call in transcript.calls}
    chain: list[RecordedCall] = []
    call = by_turn.get(last)
    while call is not None:
        chain.append(call)
        call = None if call.after is None else by_turn[call.after]
    return tuple(reversed(chain))


def offered_tools(transcript: Transcript) -> dict[int, list[dict[str, Any]]]:
    """Return the tools that each call offered, by its number."""
    found: dict[int, list[dict[str, Any]]] = {}
    tools: Sequence[dict[str, Any]] = ()
    for call in transcript.calls:
        tools = tools if call.tools is None else call.tools
        found[call.turn] = list(tools)
    return found
