"""OpenAI's responses API: parse requests, render answered calls as a `response` or events."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from areal_core.agent.apis.image_parts import message_of, parts_of
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
from areal_core.agent.apis.openai_chat import (
    TEXT_PARTS,
    answer_schema,
    parse_message,
    parse_tool_call,
    tool_choice,
)
from areal_core.agent.apis.request_fields import RESPONSES, check_fields
from areal_core.agent.conversation import Call, Interaction, Message
from areal_core.agent.errors import BadRequest

ID_PREFIX = "resp_"
TOOL_KEYS = ("description", "parameters")
REASONING_PARTS = ("summary_text", "reasoning_text")


def parse_call(body: dict[str, Any], earlier: Sequence[Interaction]) -> Call:
    """Parse a request of the responses API. Raises BadRequest."""
    check_fields(body, RESPONSES)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else take_objects(body, "input")
    messages = join_turns([parse_item(item) for item in items])
    messages = previous_messages(take(body, "previous_response_id", str, None), earlier) + messages
    if not messages:
        raise BadRequest("input is empty; expected a text or items")
    instructions = take(body, "instructions", str, "")
    system = [Message("system", instructions)] if instructions else []
    offered = tuple(tool_of_function(tool) for tool in take_objects(body, "tools"))
    choice, name = tool_choice(body)
    effort = take(take(body, "reasoning", dict, {}), "effort", str, None)
    return Call(
        messages=(*system, *messages),
        tools=() if choice == "none" else offered,
        required=required_output(
            body,
            answer_schema(take(take(body, "text", dict, {}), "format", dict, {}), "text.format", None),
            forced_functions(choice, name, offered),
            not take(body, "parallel_tool_calls", bool, True),
        ),
        sampling=sampling_fields(body, "max_output_tokens"),
        template_kwargs=template_options(body, reasoning_effort=effort),
        model=take(body, "model", str, ""),
        stream=take(body, "stream", bool, False),
    )


def parse_item(item: dict[str, Any]) -> Message:
    """Parse one input item as a message. Raises BadRequest for an unsupported kind."""
    kind = take(item, "type", str, "message")
    if kind == "message":
        return parse_message(item)
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = parse_tool_call({"id": item.get("call_id"), "function": function})
        return Message("assistant", "", tool_calls=(call,))
    if kind == "function_call_output":
        output = parts_of(item.get("output"), "the output of a function", TEXT_PARTS)
        return message_of("tool", output, tool_call_id=take(item, "call_id", str))
    if kind == "reasoning":
        parts = take_objects(item, "content") or take_objects(item, "summary")
        return Message("assistant", "", reasoning=text_of(parts, "a reasoning item", REASONING_PARTS))
    raise BadRequest(
        f"an input item has type {kind!r}; expected message, reasoning, function_call or function_call_output"
    )


def join_turns(messages: Sequence[Message]) -> tuple[Message, ...]:
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and last.role == message.role == "assistant":
            is_reasoning = not last.content and not last.tool_calls
            if is_reasoning or message.tool_calls:
                message = Message(
                    "assistant",
                    last.content + message.content,
                    last.tool_calls + message.tool_calls,
                    reasoning=last.reasoning or message.reasoning,
                )
                joined.pop()
        joined.append(message)
    # Reasoning that no answer follows says nothing to the model.
    return tuple(m for m in joined if m.role != "assistant" or m.content or m.tool_calls or not m.reasoning)


def previous_messages(response_id: str | None, earlier: Sequence[Interaction]) -> tuple[Message, ...]:
    """Return the conversation up to a previous response of this session, without its instructions.

    Raises BadRequest.
    """
    if response_id is None:
        return ()
    for interaction in earlier:
        if interaction.id == response_id:
            return tuple(message for message in interaction.conversation if message.role != "system")
    raise BadRequest(
        f"previous_response_id {response_id!r} is not a response of this session", 404, "not_found"
    )


def tool_of_function(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert the flat form of a tool to the nested one of templates. Raises BadRequest."""
    function = {"name": take(tool, "name", str)} | {key: tool[key] for key in TOOL_KEYS if key in tool}
    return {"type": "function", "function": function}


def render_reply(interactions: Sequence[Interaction], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return a `response` object."""
    (interaction,) = interactions
    cut = interaction.response.stop_reason != "stop"
    num_prompt, num_output = len(interaction.response.input_tokens), len(interaction.response.output_tokens)
    return {
        "id": interaction.id,
        "object": "response",
        "created_at": interaction.created,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": interaction.call.model,
        "output": output_items(interaction),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_output,
        },
    }


def output_items(interaction: Interaction) -> list[dict[str, Any]]:
    """Return the output of a response: reasoning, message, function calls."""
    message, suffix = interaction.message, interaction.id.removeprefix(ID_PREFIX)
    items: list[dict[str, Any]] = []
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{suffix}", "summary": summary})
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{suffix}",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for call in message.tool_calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call.id}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return items


def render_stream(interactions: Sequence[Interaction], tokenizer: PreTrainedTokenizerBase) -> Iterator[bytes]:
    """Yield the numbered server-sent events of a response."""
    reply = render_reply(interactions, tokenizer)
    started = reply | {"status": "in_progress", "output": [], "usage": None}
    events = [{"type": "response.created", "response": started}]
    for index, item in enumerate(reply["output"]):
        events += item_events(index, item)
    events.append({"type": f"response.{reply['status']}", "response": reply})
    for number, event in zip(itertools.count(), events, strict=False):
        yield sse(event | {"sequence_number": number}, str(event["type"]))


def item_events(index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of one output item: added, its text or arguments, done."""
    place = {"item_id": item["id"], "output_index": index}
    middle: list[dict[str, Any]] = []
    empty = dict(item)
    if item["type"] == "message":
        part, empty["content"] = item["content"][0], []
        text = {**place, "content_index": 0}
        middle = [
            {"type": "response.content_part.added", **text, "part": part | {"text": ""}},
            {"type": "response.output_text.delta", **text, "delta": part["text"], "logprobs": []},
            {"type": "response.output_text.done", **text, "text": part["text"], "logprobs": []},
            {"type": "response.content_part.done", **text, "part": part},
        ]
    elif item["type"] == "function_call":
        empty["arguments"] = ""
        begin = "response.function_call_arguments"
        middle = [
            {"type": f"{begin}.delta", **place, "delta": item["arguments"]},
            {"type": f"{begin}.done", **place, "arguments": item["arguments"], "name": item["name"]},
        ]
    return [
        {"type": "response.output_item.added", "output_index": index, "item": empty},
        *middle,
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]
