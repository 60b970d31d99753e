"""Messages, calls and answered calls in one form for every API dialect; how calls may continue."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from areal_core.rollout.types import ModelResponse

# Reasons for which a prompt does not begin with the tokens of the call that it continues.
BROKEN = {
    "reasoning": "the template leaves out reasoning that was sampled",
    "tool_call": "the template renders a sampled tool call differently",
    "text": "the template renders sampled text differently",
    "tools_changed": "the call offers other tools, which the template renders before the conversation",
    "system_rewritten": "the system prompt was rewritten",
    "compacted": "earlier messages were left out or summarised",
    "edited": "the client changed an earlier message",
}
RENDERED = ("reasoning", "tool_call", "text")  # chat_template_type "concat" never renders these again
# The values of a batch's `branch`: the index in this tuple.
BRANCHES = ("root", "continued", "fork", "sub_agent", "separate", *BROKEN)


@dataclass(frozen=True)
class ToolCall:
    """A function call that the model requests; `arguments` is JSON text.

    Calls that a client repeats from elsewhere may have other text, which templates get as it is.
    """

    id: str
    name: str
    arguments: str

    def parsed_arguments(self) -> Any:
        """Return the arguments as an object; as text if they are not one."""
        try:
            parsed = json.loads(self.arguments)
        except ValueError:
            return self.arguments
        return parsed if isinstance(parsed, dict) else self.arguments


@dataclass(frozen=True)
class RemoteImage:
    """A picture that is not fetched yet."""

    url: str


Part = str | bytes | RemoteImage  # a text, or a picture


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Messages that differ only in reasoning are equal, since clients drop it.

    Attributes:
        content: all its text.
        parts: texts and pictures in order, if it has pictures; empty otherwise.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = field(default=None, compare=False)
    parts: tuple[Part, ...] = ()

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form of chat templates: arguments of tool calls are objects."""
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in self.parts
        ]
        shown: dict[str, Any] = {"role": self.role, "content": content or self.content}
        if self.tool_calls:
            shown["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.parsed_arguments()},
                }
                for call in self.tool_calls
            ]
        optional = {"tool_call_id": self.tool_call_id, "name": self.name, "reasoning_content": self.reasoning}
        return shown | {key: value for key, value in optional.items() if value}


@dataclass(frozen=True, kw_only=True)
class Required:
    """What the output must be; nothing by default."""

    schema: Any = None  # JSON schema of the answer
    functions: tuple[str, ...] = ()  # one of them must be called
    single_call: bool = False  # at most one forced call
    grammar: Mapping[str, str] = field(default_factory=dict)  # {"regex": ...} or {"ebnf": ...}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the model as a client requested it."""

    messages: tuple[Message, ...]
    # {"type": "function", "function": {name, description, parameters}}
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None  # instead of rendered messages
    n: int = 1  # completions
    required: Required = Required()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # `Sampling` fields of the client
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    stream: bool = False
    stream_usage: bool = False  # a last chunk without choices, for clients that request it
    logprobs: bool = False
    echo: bool = False  # the reply repeats the prompt

    @property
    def images(self) -> tuple[bytes, ...]:
        """The pictures of the prompt, in order."""
        return tuple(part for m in self.messages for part in m.parts if isinstance(part, bytes))


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """One answered call: the tokens as sampled, and the message that the client received."""

    id: str
    turn: int  # number of the call within its session, from 0
    call: Call
    response: ModelResponse
    message: Message
    created: int  # seconds since the epoch
    latency_s: float

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion: the prefix of any turn that continues this one."""
        return self.response.input_tokens + self.response.output_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.response.input_tokens) + len(self.response.output_tokens)

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages of the prompt, and the answer."""
        return (*self.call.messages, self.message)
