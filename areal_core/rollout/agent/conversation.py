"""What an agent says and hears, in one form for every dialect: messages, calls of the model, and what came of them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from areal_core.rollout.types import ModelResponse


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants called; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message of a conversation. Two that differ only in their reasoning are equal: clients drop it."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = field(default=None, compare=False)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: arguments of tool calls are objects."""
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            shown["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in self.tool_calls
            ]
        optional = {"tool_call_id": self.tool_call_id, "name": self.name, "reasoning_content": self.reasoning}
        return shown | {key: value for key, value in optional.items() if value}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the model as a client asked for it."""

    messages: tuple[Message, ...]
    tools: tuple[
        dict[str, Any], ...
    ] = ()  # {"type": "function", "function": {name, description, parameters}}
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of `Sampling` that the client set
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    stream: bool = False
    stream_usage: bool = False  # a last chunk without choices, for clients that ask for it
    logprobs: bool = False


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """One answered call: the tokens as they were sampled, and the message that the client was given."""

    id: str
    turn: int  # number of the call within its session, from 0
    call: Call
    response: ModelResponse
    message: Message
    created: int  # seconds since the epoch
    latency_s: float

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion: what a following turn has to begin with to continue this one."""
        return self.response.input_tokens + self.response.output_tokens
