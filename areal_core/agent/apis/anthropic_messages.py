"""Anthropic's messages API: parse requests, render answered calls as messages or events."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from areal_core.agent.apis.image_parts import message_of, part_of, parts_of
from areal_core.agent.apis.json_fields import (
    forced_functions,
    required_output,
    sampling_fields,
    sse,
    take,
    take_objects,
    template_options,
    text_of,
)
from areal_core.agent.apis.openai_chat import answer_schema
from areal_core.agent.apis.request_fields import MESSAGES, check_fields
from areal_core.agent.conversation import Call, Interaction, Message, Part, ToolCall
from areal_core.agent.errors import BadRequest
from areal_core.agent.output_parsers import dump

ID_PREFIX = "msg_"
ERROR_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def parse_call(body: dict[str, Any], earlier: Sequence[Interaction]) -> Call:
    """Parse a request of the messages API. Raises BadRequest."""
    check_fields(body, MESSAGES)
    system = text_of(body.get("system"), "system")
    messages = [part for message in take_objects(body, "messages") for part in parse_message(message)]
    if not messages:
        raise BadRequest("messages is empty; expected at least one")
    offered = tuple(map(tool_of_schema, take_objects(body, "tools")))
    choice = take(body, "tool_choice", dict, {})
    kind = take(choice, "type", str, "auto")
    output = take(body, "output_config", dict, {})
    thinking = take(take(body, "thinking", dict, {}), "type", str, None)
    return Call(
        messages=(*([Message("system", system)] if system else []), *messages),
        tools=() if kind == "none" else offered,
        required=required_output(
            body,
            answer_schema(take(output, "format", dict, {}), "output_config.format", None),
            forced_functions(kind, take(choice, "name", str, None), offered),
            take(choice, "disable_parallel_tool_use", bool, False),
        ),
        sampling=sampling_fields(body, "max_tokens"),
        template_kwargs=template_options(
            body,
            enable_thinking={"enabled": True, "disabled": False}.get(thinking),
            reasoning_effort=take(output, "effort", str, None),
        ),
        model=take(body, "model", str, ""),
        stream=take(body, "stream", bool, False),
    )


def parse_message(message: dict[str, Any]) -> list[Message]:
    """Parse one message: a user's to one per tool result and one for text, an assistant's to one.

    Raises BadRequest.
    """
    role = take(message, "role", str)
    content = message.get("content")
    blocks = (
        [{"type": "text", "text": content}] if isinstance(content, str) else take_objects(message, "content")
    )
    parts: list[Part] = []
    reasoning = []
    calls: list[ToolCall] = []
    results: list[Message] = []
    for block in blocks:
        match block:
            case {"type": "thinking", "thinking": str(thought)}:
                reasoning.append(thought)
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": arguments}:
                calls.append(ToolCall(id, name, arguments if isinstance(arguments, str) else dump(arguments)))
            case {"type": "tool_result", "tool_use_id": str(id)}:
                output = parts_of(block.get("content"), "the content of a tool result")
                results.append(message_of("tool", output, tool_call_id=id))
            case _:
                parts.append(part_of(block, f"a {role} message"))
    spoken = message_of(role, tuple(parts), tool_calls=tuple(calls), reasoning="".join(reasoning) or None)
    return [*results, spoken] if any(parts) or calls or not results else results


def tool_of_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert Anthropic's form of a tool to that of chat templates. Raises BadRequest."""
    function = {"name": take(tool, "name", str), "parameters": take(tool, "input_schema", dict)}
    return {"type": "function", "function": function | {"description": take(tool, "description", str, "")}}


def render_reply(interactions: Sequence[Interaction], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return a `message` object."""
    (interaction,) = interactions
    return {
        "id": interaction.id,
        "type": "message",
        "role": "assistant",
        "model": interaction.call.model,
        "content": content_blocks(interaction.message),
        "stop_reason": stop_reason(interaction),
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(interaction.response.input_tokens),
            "output_tokens": len(interaction.response.output_tokens),
        },
    }


def content_blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        arguments = json.loads(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def stop_reason(interaction: Interaction) -> str:
    """Return the stop reason by Anthropic's names."""
    if interaction.response.stop_reason != "stop":
        return "max_tokens"
    return "tool_use" if interaction.message.tool_calls else "end_turn"


def render_stream(interactions: Sequence[Interaction], tokenizer: PreTrainedTokenizerBase) -> Iterator[bytes]:
    """Yield the server-sent events of a message."""
    reply = render_reply(interactions, tokenizer)

    def event(kind: str, **facts: Any) -> bytes:
        return sse({"type": kind, **facts}, kind)

    started = reply | {"content": [], "stop_reason": None, "usage": reply["usage"] | {"output_tokens": 0}}
    yield event("message_start", message=started)
    for index, block in enumerate(reply["content"]):
        empty, delta = opening_and_delta(block)
        yield event("content_block_start", index=index, content_block=empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    ending = {"stop_reason": reply["stop_reason"], "stop_sequence": None}
    usage = {"output_tokens": reply["usage"]["output_tokens"]}
    yield event("message_delta", delta=ending, usage=usage)
    yield event("message_stop")


def opening_and_delta(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    match block["type"]:
        case "tool_use":
            delta = {"type": "input_json_delta", "partial_json": dump(block["input"])}
            return block | {"input": {}}, delta
        case kind:
            return block | {kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def render_error(status: int, code: str, message: str) -> dict[str, Any]:
    kind = ERROR_KINDS.get(status, "api_error" if status >= 500 else code)
    return {"type": "error", "error": {"type": kind, "message": message}}
