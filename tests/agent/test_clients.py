"""The proxy over HTTP, used by the official clients."""

import json
import logging

import openai
import pytest

from areal_core.agent.transcript import without_transcripts
from tests.agent.conftest import CALLS_WEATHER, TOOL, WEATHER

SAYS_AND_CALLS = f"Let me look.{CALLS_WEATHER}"
QUESTION = {"model": "m", "messages": [{"role": "user", "content": "?"}]}


def test_chat_completion_answers_and_its_tokens_are_those_sampled(run_client, scripted_engine, tokenizer):
    async def body(client):
        return await client.openai().chat.completions.create(
            model="any", messages=[{"role": "user", "content": "2+2?"}], max_tokens=9, logprobs=True
        )

    engine = scripted_engine("4")
    reply, rows = run_client(engine, body)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("4", "stop")
    assert (reply.model, reply.usage.prompt_tokens, reply.usage.completion_tokens) == ("any", 7, 2)
    assert [(e.token, e.logprob) for e in reply.choices[0].logprobs.content] == [
        ("4", -0.125),
        ("<|end|>", -0.25),
    ]
    prompt = tokenizer.encode("<|user|>2+2?<|end|><|assistant|>", add_special_tokens=False)
    completion = tokenizer.encode("4<|end|>", add_special_tokens=False)
    assert {key: value.tolist() for key, value in without_transcripts(rows).items()} == {
        "input_ids": [prompt + completion],
        "attention_mask": [[True] * 9],
        "loss_mask": [[0] * 7 + [1, 1]],
        "logprobs": [[0.0] * 7 + [-0.125, -0.25]],
        "versions": [[-1] * 7 + [3, 3]],
        "rewards": [1.0],
        "finish_reason": [0],
        "turns": [[0] * 7 + [1, 1]],
        "parent_turn": [-1],
        "branch": [0],
        "failure": [0],
    }
    assert engine.requests[0].sampling.max_new_tokens == 9
    assert engine.requests[0].metadata == {"turn": 0}


def test_chat_completion_with_tools_streamed_and_unstreamed(run_client, scripted_engine):
    async def body(client):
        request_options = {"model": "m", "messages": [{"role": "user", "content": "Oslo?"}], "tools": [TOOL]}
        create = client.openai().chat.completions.create
        unstreamed = (await create(**request_options)).choices[0]
        with_usage = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await create(**request_options, **with_usage)]
        return unstreamed, chunks

    (unstreamed, chunks), _ = run_client(scripted_engine(SAYS_AND_CALLS, SAYS_AND_CALLS), body)
    call = unstreamed.message.tool_calls[0]
    assert (unstreamed.finish_reason, unstreamed.message.content) == ("tool_calls", "Let me look.")
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Let me look."
    called = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(c.index, c.function.name, c.function.arguments) for c in called] == [
        (0, "weather", '{"city": "Oslo"}')
    ]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens > 0


def test_responses_answer_text_and_function_calls_and_remember_the_previous_one(
    run_client, scripted_engine, tokenizer
):
    flat = {"type": "function", **WEATHER, "strict": False}

    async def body(client):
        create = client.openai().responses.create
        first = await create(model="m", instructions="Be brief.", input="Oslo?", tools=[flat])
        call = next(item for item in first.output if item.type == "function_call")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = await create(
            model="m", instructions="Be brief.", previous_response_id=first.id, input=[output], tools=[flat]
        )
        return call, second

    engine = scripted_engine(SAYS_AND_CALLS, "Rain...")
    (call, second), _ = run_client(engine, body)
    assert (call.name, call.arguments) == ("weather", '{"city": "Oslo"}')
    assert (second.output_text, second.status) == ("Rain...", "incomplete")
    assert second.usage.output_tokens == 7
    assert tokenizer.decode(engine.requests[1].input_ids) == (
        "<|system|>tools: weather<|end|><|system|>Be brief.<|end|><|user|>Oslo?<|end|>"
        f"<|assistant|>{SAYS_AND_CALLS}<|end|><|user|>rain<|end|><|assistant|>"
    )


def test_responses_stream_in_the_order_that_the_client_expects(run_client, scripted_engine):
    flat = {"type": "function", **WEATHER, "strict": False}

    async def body(client):
        create = client.openai().responses.create
        return [event async for event in await create(model="m", input="Oslo?", tools=[flat], stream=True)]

    events, _ = run_client(scripted_engine(SAYS_AND_CALLS), body)
    assert [event.type for event in events] == [
        "response.created",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(12))
    assert events[-1].response.output_text == "Let me look."


def test_anthropic_messages_with_tools_and_the_result_of_one(run_client, scripted_engine, tokenizer):
    tool = {"name": "weather", "description": "d", "input_schema": WEATHER["parameters"]}

    async def body(client):
        messages = [{"role": "user", "content": "Oslo?"}]
        request_options = {"model": "m", "max_tokens": 50, "system": "Be brief.", "tools": [tool]}
        async with client.anthropic() as client:
            first = await client.messages.create(messages=messages, **request_options)
            used = next(block for block in first.content if block.type == "tool_use")
            result = {"type": "tool_result", "tool_use_id": used.id, "content": "rain"}
            messages += [
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result]},
            ]
            return first, await client.messages.create(messages=messages, **request_options)

    engine = scripted_engine(SAYS_AND_CALLS, "Rain.")
    (first, second), _ = run_client(engine, body, gconfig={"max_new_tokens": 20})
    assert (first.stop_reason, first.content[0].text, first.content[1].input) == (
        "tool_use",
        "Let me look.",
        {"city": "Oslo"},
    )
    assert (second.stop_reason, second.content[0].text, second.usage.output_tokens) == (
        "end_turn",
        "Rain.",
        6,
    )
    assert tokenizer.decode(engine.requests[1].input_ids).endswith(
        f"<|assistant|>{SAYS_AND_CALLS}<|end|><|user|>rain<|end|><|assistant|>"
    )
    assert engine.requests[0].sampling.max_new_tokens == 20  # the client's request is cut to the run's limit


def test_anthropic_stream_rebuilds_the_message(run_client, scripted_engine):
    tool = {"name": "weather", "description": "d", "input_schema": WEATHER["parameters"]}

    async def body(client):
        messages = [{"role": "user", "content": "Oslo?"}]
        request_options = {"model": "m", "max_tokens": 50, "messages": messages, "tools": [tool]}
        async with client.anthropic() as client, client.messages.stream(**request_options) as stream:
            text = [piece async for piece in stream.text_stream]
            return text, await stream.get_final_message()

    (text, final), _ = run_client(scripted_engine("<think>hm</think>" + SAYS_AND_CALLS), body)
    assert text == ["Let me look."]
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert (final.content[0].thinking, final.content[2].input, final.stop_reason) == (
        "hm",
        {"city": "Oslo"},
        "tool_use",
    )
    assert final.usage.output_tokens > 0


def refusal_of(run_client, engine, request_options, **options):
    """Return the error that answers a request; the next request of the client is honoured."""

    async def body(server):
        create = server.openai().chat.completions.create
        with pytest.raises(openai.APIStatusError) as refused:
            await create(**QUESTION | request_options)
        await create(**QUESTION)
        return refused.value

    return run_client(engine, body, **options)[0]


def test_sampling_that_the_agent_sets_is_honoured_and_logged_once(run_client, scripted_engine, caplog):
    async def body(client):
        create = client.openai().chat.completions.create
        for temperature in (0.25, 0.25, 0):
            await create(**QUESTION, temperature=temperature)
        extra = {"min_p": 0.5, "top_k": 7, "min_tokens": 2, "stop_token_ids": [9], "repetition_penalty": 1}
        await create(**QUESTION, extra_body=extra, logit_bias={"5": 1}, presence_penalty=0)

    engine = scripted_engine("a", "b", "c", "d")
    with caplog.at_level(logging.WARNING):
        run_client(engine, body)
    *laws, extended = [request.sampling for request in engine.requests]
    # The trainer's log-probs are those of temperature 1, which greedy sampling reports anyway.
    assert [(law.temperature, law.greedy, law.model_logprobs) for law in laws] == [
        (0.25, False, True),
        (0.25, False, True),
        (1.0, True, False),
    ]
    assert caplog.text.count("requests temperature 0.25, and gconfig.temperature is 1.0") == 1
    assert extended.server_only == {"min_p": 0.5, "logit_bias": {"5": 1}}
    assert (extended.top_k, extended.min_new_tokens, extended.model_logprobs) == (7, 2, True)
    assert extended.stop_token_ids == [0, 1, 9]


@pytest.mark.parametrize(
    ("request_options", "seen_text"),
    [
        ({"n": 0}, "n is 0; expected 1 to 128"),
        ({"n": 10**30}, f"n is {10**30}; expected 1 to 128"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"content": "x"}]}, "role is missing; expected a text"),
        ({"temperature": -1}, "temperature is -1; expected at least 0"),
        ({"max_tokens": 0}, "max_new_tokens is 0; expected at least 1"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": False}}}, "has tokenize, which the proxy sets"),
        ({"tool_choice": "required"}, "tool_choice requires a call, and the tools are none"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
            "tool_choice requires clock, and the tools are weather",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format has type 'grammar'; expected text"),
        ({"functions": [{"name": "f"}]}, "which is not available: use tools and tool_choice"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field is '1', and the proxy has no such field"),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"regex": "a"}},
            "response_format and regex are given, and the output can follow only one of them",
        ),
        ({"stop": ["a", 3]}, "stop contains 3; expected texts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "image URL 'x' is neither a data: URL nor http(s)",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "only text and images are supported",
        ),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused_with_the_field_and_its_value(
    run_client, scripted_engine, request_options, seen_text
):
    refusal = refusal_of(run_client, scripted_engine("ok"), request_options)
    assert isinstance(refusal, openai.BadRequestError)
    assert seen_text in refusal.body["message"]


def test_a_body_that_is_too_large_is_refused(run_client, scripted_engine):
    long = {"messages": [{"role": "user", "content": "x" * 3000}]}
    refusal = refusal_of(run_client, scripted_engine("ok"), long, max_body_bytes=2000)
    assert refusal.status_code == 413
    assert refusal.body["message"] == "the request is larger than rollout.agent.max_body_bytes, 2000"


def test_a_conversation_that_fills_the_context_is_refused_as_such(run_client, scripted_engine):
    long = {"messages": [{"role": "user", "content": "x" * 99}]}
    refusal = refusal_of(run_client, scripted_engine("ok"), long, gconfig={"max_tokens": 50})
    assert isinstance(refusal, openai.BadRequestError)
    assert refusal.code == "context_length_exceeded"
