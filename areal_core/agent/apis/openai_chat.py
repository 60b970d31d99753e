"""OpenAI's chat completions API: parse requests, render answered calls as JSON or chunks."""

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from areal_core.agent.apis.json_fields import (
    refuse,
    sampling_fields,
    sse,
    take,
    take_objects,
    template_options,
    text_of,
)
from areal_core.agent.conversation import Call, Interaction, Message, ToolCall
from areal_core.agent.errors import BadRequest
from areal_core.agent.output_parsers import dump, json_value

ID_PREFIX = "chatcmpl-"
NOT_ENFORCED = "sampling is unconstrained; request it in the prompt"


def parse_call(body: dict[str, Any], earlier: Sequence[Interaction]) -> Call:
    """Parse a request of the chat completions API. Raises BadRequest."""
    refuse(body, "n", (1,), "send n requests")
    refuse(body, "logit_bias", ({},), "behaviour logprobs would no longer be those of the model")
    refuse(body, "presence_penalty", (0,), "behaviour logprobs would no longer be those of the model")
    refuse(body, "response_format", ({"type": "text"},), NOT_ENFORCED)
    stop = body["stop"] if isinstance(body.get("stop"), list) else [take(body, "stop", str, "")]
    sampling = sampling_fields(body, "max_completion_tokens", "max_tokens")
    messages = tuple(parse_message(message) for message in take_objects(body, "messages"))
    if not messages:
        raise BadRequest("messages is empty; expected at least one")
    return Call(
        messages=messages,
        tools=offered_tools(body, tuple(take_objects(body, "tools"))),
        sampling=sampling | ({"stop": stop} if any(stop) else {}),
        template_kwargs=template_options(body),
        model=take(body, "model", str, ""),
        stream=take(body, "stream", bool, False),
        stream_usage=take(take(body, "stream_options", dict, {}), "include_usage", bool, False),
        logprobs=take(body, "logprobs", bool, False),
    )


def offered_tools(body: dict[str, Any], tools: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Return the tools for the template; none with tool_choice "none". Raises BadRequest."""
    refuse(body, "tool_choice", ("auto", "none"), NOT_ENFORCED)
    for tool in tools:
        take(take(tool, "function", dict), "name", str)
    return () if take(body, "tool_choice", str, "auto") == "none" else tools


def parse_message(message: dict[str, Any]) -> Message:
    """Parse one message. Raises BadRequest."""
    role = take(message, "role", str)
    return Message(
        role="system" if role == "developer" else role,
        content=text_of(message.get("content"), f"the content of a {role} message"),
        tool_calls=tuple(parse_tool_call(call) for call in take_objects(message, "tool_calls")),
        tool_call_id=take(message, "tool_call_id", str, None),
        name=take(message, "name", str, None),
        reasoning=take(message, "reasoning_content", str, None),
    )


def parse_tool_call(call: dict[str, Any]) -> ToolCall:
    """Parse one tool call of an earlier turn. Raises BadRequest."""
    function = take(call, "function", dict)
    arguments = json_value(take(function, "arguments", str, "{}") or "{}")
    if not isinstance(arguments, dict):
        raise BadRequest(f"arguments is {function['arguments']!r}; expected a JSON object as text")
    return ToolCall(take(call, "id", str), take(function, "name", str), dump(arguments))


def render_reply(interaction: Interaction, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return a `chat.completion` object."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": interaction.message.content or None,
            **extras(interaction),
        },
        "finish_reason": finish_reason(interaction),
        "logprobs": {"content": token_logprobs(interaction, tokenizer)}
        if interaction.call.logprobs
        else None,
    }
    return envelope(interaction, "chat.completion") | {"choices": [choice], "usage": usage(interaction)}


def render_stream(interaction: Interaction, tokenizer: PreTrainedTokenizerBase) -> Iterator[bytes]:
    """Yield the completion as chunks, all after sampling has ended, when tool calls are known."""

    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return sse(envelope(interaction, "chat.completion.chunk") | {"choices": [choice]})

    message = interaction.message
    yield chunk({"role": "assistant", "content": ""})
    if message.reasoning:
        yield chunk({"reasoning_content": message.reasoning})
    if message.content:
        yield chunk({"content": message.content})
    for index, call in enumerate(message.tool_calls):
        yield chunk({"tool_calls": [{"index": index, **tool_call_json(call)}]})
    yield chunk({}, finish_reason(interaction))
    if interaction.call.stream_usage:
        facts = {"choices": [], "usage": usage(interaction)}
        yield sse(envelope(interaction, "chat.completion.chunk") | facts)
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
    """Return a tool call in OpenAI's form."""
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
    """Return one entry per sampled token, with its behaviour logprob."""
    response = interaction.response
    return [
        {"token": tokenizer.decode([token]), "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(response.output_tokens, response.output_logprobs, strict=True)
    ]


def usage(interaction: Interaction) -> dict[str, int]:
    """Return the token counts of a call."""
    num_prompt, num_output = len(interaction.response.input_tokens), len(interaction.response.output_tokens)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def render_error(status: int, code: str, message: str) -> dict[str, Any]:
    """Return an error in OpenAI's form, which the responses API shares."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}
