"""OpenAI's chat completions API: parse requests, render answered calls as JSON or chunks."""

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from areal_core.agent.apis.image_parts import message_of, parts_of
from areal_core.agent.apis.json_fields import (
    forced_functions,
    required_output,
    sampling_fields,
    schema_of,
    shown,
    sse,
    take,
    take_objects,
    template_options,
)
from areal_core.agent.apis.request_fields import CHAT, check_fields
from areal_core.agent.conversation import Call, Interaction, Message, RemoteImage, ToolCall
from areal_core.agent.errors import BadRequest
from areal_core.agent.grammar import ANY_OBJECT
from areal_core.agent.output_parsers import dump, json_value
from areal_core.data.images import data_url

ID_PREFIX = "chatcmpl-"
TEXT_PARTS = ("text", "input_text", "output_text")  # of chat completions; of responses
MAX_CHOICES = 128  # as at OpenAI


def parse_call(body: dict[str, Any], earlier: Sequence[Interaction]) -> Call:
    """Parse a request of the chat completions API. Raises BadRequest."""
    check_fields(body, CHAT)
    messages = tuple(parse_message(message) for message in take_objects(body, "messages"))
    if not messages:
        raise BadRequest("messages is empty; expected at least one")
    offered = tuple(take_objects(body, "tools"))
    for tool in offered:
        take(take(tool, "function", dict), "name", str)
    choice, name = tool_choice(body)
    return Call(
        messages=messages,
        tools=() if choice == "none" else offered,
        required=required_output(
            body,
            answer_schema(take(body, "response_format", dict, {}), "response_format", "json_schema"),
            forced_functions(choice, name, offered),
            not take(body, "parallel_tool_calls", bool, True),
        ),
        n=count_of_choices(body),
        sampling=sampling_fields(body, "max_completion_tokens", "max_tokens"),
        template_kwargs=template_options(body, reasoning_effort=take(body, "reasoning_effort", str, None)),
        model=take(body, "model", str, ""),
        stream=take(body, "stream", bool, False),
        stream_usage=take(take(body, "stream_options", dict, {}), "include_usage", bool, False),
        logprobs=take(body, "logprobs", bool, False),
    )


def count_of_choices(body: dict[str, Any]) -> int:
    """Return `n`. Raises BadRequest if it is below 1 or above MAX_CHOICES."""
    n: int = take(body, "n", int, 1)
    if not 1 <= n <= MAX_CHOICES:
        raise BadRequest(f"n is {n}; expected 1 to {MAX_CHOICES}")
    return n


def tool_choice(body: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the kind of `tool_choice`, and the function that it names. Raises BadRequest."""
    match body.get("tool_choice"):
        case None | str() as choice:
            return choice, None
        # Of chat completions; of responses.
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return "function", name
        case other:
            raise BadRequest(f"tool_choice is {shown(other)}; expected auto, none, required or a function")


def answer_schema(format: dict[str, Any], where: str, inner: str | None) -> Any:
    """Return the JSON schema of an answer's format; None for text.

    Args:
        inner: the object of the format that has `schema`; None for the format itself.

    Raises:
        BadRequest: another format.
    """
    match take(format, "type", str, "text"):
        case "text":
            return None
        case "json_object":
            return ANY_OBJECT
        case "json_schema":
            described = take(format, inner, dict) if inner else format
            return schema_of(described.get("schema"), f"the schema of {where}")
        case kind:
            raise BadRequest(f"{where} has type {kind!r}; expected text, json_object or json_schema")


def parse_message(message: dict[str, Any]) -> Message:
    """Parse one message. Raises BadRequest."""
    role = take(message, "role", str)
    return message_of(
        "system" if role == "developer" else role,
        parts_of(message.get("content"), f"the content of a {role} message", TEXT_PARTS),
        tool_calls=tuple(parse_tool_call(call) for call in take_objects(message, "tool_calls")),
        tool_call_id=take(message, "tool_call_id", str, None),
        name=take(message, "name", str, None),
        reasoning=take(message, "reasoning_content", str, take(message, "reasoning", str, None)),
    )


def message_json(message: Message) -> dict[str, Any]:
    """Return a message as a request has it."""
    parts = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": "image_url",
            "image_url": {"url": part.url if isinstance(part, RemoteImage) else data_url(part)},
        }
        for part in message.parts
    ]
    optional = {
        "tool_calls": [tool_call_json(call) for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "reasoning_content": message.reasoning,
    }
    shown = {"role": message.role, "content": parts or message.content}
    return shown | {key: value for key, value in optional.items() if value}


def parse_tool_call(call: dict[str, Any]) -> ToolCall:
    """Parse one tool call of an earlier turn. Raises BadRequest.

    Arguments that are no JSON object stay as they are: a template shows them as text.
    """
    function = take(call, "function", dict)
    arguments = take(function, "arguments", str, "") or "{}"
    parsed = json_value(arguments)
    text = dump(parsed) if isinstance(parsed, dict) else arguments
    return ToolCall(take(call, "id", str), take(function, "name", str), text)


def render_reply(interactions: Sequence[Interaction], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return a `chat.completion` object, with a choice per interaction."""
    choices = [
        {
            "index": index,
            "message": {
                "role": "assistant",
                "content": interaction.message.content or None,
                **extras(interaction),
            },
            "finish_reason": finish_reason(interaction),
            "logprobs": {"content": token_logprobs(interaction, tokenizer)}
            if interaction.call.logprobs
            else None,
            "interaction_id": interaction.id,
        }
        for index, interaction in enumerate(interactions)
    ]
    return envelope(interactions[0], "chat.completion") | {"choices": choices, "usage": usage(interactions)}


def render_stream(interactions: Sequence[Interaction], tokenizer: PreTrainedTokenizerBase) -> Iterator[bytes]:
    """Yield the completion as chunks, all after sampling has ended, when tool calls are known."""
    first = interactions[0]

    def chunk(index: int, delta: dict[str, Any], **ending: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": None} | ending
        return sse(envelope(first, "chat.completion.chunk") | {"choices": [choice]})

    for index, interaction in enumerate(interactions):
        message = interaction.message
        yield chunk(index, {"role": "assistant", "content": ""})
        if message.reasoning:
            yield chunk(index, {"reasoning_content": message.reasoning})
        if message.content:
            yield chunk(index, {"content": message.content})
        for number, call in enumerate(message.tool_calls):
            yield chunk(index, {"tool_calls": [{"index": number, **tool_call_json(call)}]})
        ending: dict[str, Any] = {"finish_reason": finish_reason(interaction)}
        if interaction.call.logprobs:
            ending["logprobs"] = {"content": token_logprobs(interaction, tokenizer)}
        yield chunk(index, {}, **ending)
    if first.call.stream_usage:
        facts = {"choices": [], "usage": usage(interactions)}
        yield sse(envelope(first, "chat.completion.chunk") | facts)
    yield sse("[DONE]")


def extras(interaction: Interaction) -> dict[str, Any]:
    """Return the reasoning and the tool calls of a message, if any."""
    message = interaction.message
    found: dict[str, Any] = {"reasoning_content": message.reasoning} if message.reasoning else {}
    if message.tool_calls:
        found["tool_calls"] = [tool_call_json(call) for call in message.tool_calls]
    return found


def envelope(interaction: Interaction, kind: str) -> dict[str, Any]:
    """Return the fields that completions and chunks have in common."""
    return {
        "id": interaction.id,
        "object": kind,
        "created": interaction.created,
        "model": interaction.call.model,
    }


def tool_call_json(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def finish_reason(interaction: Interaction) -> str:
    """Return the finish reason by OpenAI's names."""
    if interaction.response.stop_reason == "stop" and interaction.message.tool_calls:
        return "tool_calls"
    return "stop" if interaction.response.stop_reason == "stop" else "length"


def token_logprobs(interaction: Interaction, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    response = interaction.response
    return [
        {"token": tokenizer.decode([token]), "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(response.output_tokens, response.output_logprobs, strict=True)
    ]


def usage(interactions: Sequence[Interaction]) -> dict[str, int]:
    """Return the token counts of a call; its prompt counts once."""
    num_prompt = len(interactions[0].response.input_tokens)
    num_output = sum(len(interaction.response.output_tokens) for interaction in interactions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def render_error(status: int, code: str, message: str) -> dict[str, Any]:
    """Return an error in OpenAI's form, which the responses API shares."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}
