"""What clients send beside plain messages: n, raw prompts, counts, models, echoes, odd text."""

import json

import pytest

from areal_core.errors import ConfigError
from tests.agent.conftest import CALLS_WEATHER, TOOL, WEATHER

ASK = [{"role": "user", "content": "?"}]


def test_a_text_and_token_ids_are_completed_without_the_template(run_client, scripted_engine, tokenizer):
    async def body(client):
        create = client.openai().completions.create
        first = await create(model="m", prompt="2+2=", max_tokens=4, echo=True, logprobs=1, n=2)
        second = await create(model="m", prompt=[[7, 8, 9]], stream=True)
        return first, [chunk async for chunk in second]

    engine = scripted_engine("4", "<think>5", "<tool_call>")
    (first, chunks), _ = run_client(engine, body)
    assert [choice.text for choice in first.choices] == ["2+2=4", "2+2=<think>5"]
    logprobs = first.choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs) == (["4", "<|end|>"], [-0.125, -0.25])
    assert logprobs.text_offset == [4, 5]
    assert [chunk.choices[0].text for chunk in chunks] == ["<tool_call>"]
    assert [r.input_ids for r in engine.requests] == [tokenizer.encode("2+2=")] * 2 + [[7, 8, 9]]


def test_tokens_are_counted_and_models_listed_for_both_clients(run_client, scripted_engine):
    tool = {"name": "weather", "description": "d", "input_schema": WEATHER["parameters"]}

    async def body(server):
        client = server.openai()
        async with server.anthropic() as other:
            counted = await other.messages.count_tokens(
                model="m", messages=ASK, tools=[tool], system="Be brief."
            )
            theirs = [model.id async for model in other.models.list()]
        ours = [model.id async for model in client.models.list()]
        one = await client.models.retrieve("any-name")
        refused = await server.http.get(f"{server.base_url}/v1/models")
        reply = await client.chat.completions.create(
            model="m", messages=[{"role": "system", "content": "Be brief."}, *ASK], tools=[TOOL]
        )
        return counted, theirs, ours, one.id, refused.status_code, reply

    (counted, theirs, ours, one, status, reply), rows = run_client(scripted_engine("a"), body)
    assert counted.input_tokens == reply.usage.prompt_tokens
    assert (theirs, ours, one, status) == (["policy"], ["policy"], "any-name", 401)
    assert len(rows["rewards"]) == 1  # nothing was sampled for a count


def test_a_body_that_is_nested_too_deeply_is_refused(run_client, scripted_engine):
    async def body(server):
        deep = '{"messages":' + "[" * 100_000 + "]" * 100_000 + "}"
        reply = await server.post("/chat/completions", deep)
        await server.openai().completions.create(model="m", prompt="a")
        return reply

    reply, _ = run_client(scripted_engine("a"), body)
    assert reply.status_code == 400
    assert "the body is not JSON: maximum recursion depth" in reply.json()["error"]["message"]


@pytest.mark.parametrize("arguments", ['{"city": "Os', "[1]", "Oslo"])
def test_a_repeated_call_with_broken_arguments_is_rendered_as_text(
    run_client, scripted_engine, tokenizer, arguments
):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    item = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": arguments}

    async def body(server):
        client = server.openai()
        echoed = [*ASK, {"role": "assistant", "tool_calls": [call]}]
        await client.chat.completions.create(
            model="m", messages=[*echoed, {"role": "tool", "tool_call_id": "1", "content": "bad"}]
        )
        output = {"type": "function_call_output", "call_id": "1", "output": "bad"}
        await client.responses.create(model="m", input=[*ASK, item, output])

    engine = scripted_engine("a", "b")
    run_client(engine, body)
    shown = f'<tool_call>{{"name": "weather", "arguments": {json.dumps(arguments)}}}</tool_call>'
    for request in engine.requests:
        assert tokenizer.decode(request.input_ids) == (
            f"<|user|>?<|end|><|assistant|>{shown}<|end|><|user|>bad<|end|><|assistant|>"
        )


def test_reasoning_is_returned_and_its_echo_reaches_the_template(run_client, scripted_engine, monkeypatch):
    async def body(server):
        client = server.openai()
        first = (await client.chat.completions.create(model="m", messages=ASK)).choices[0].message
        for name in ("reasoning_content", "reasoning"):
            echo = {"role": "assistant", "content": first.content, name: first.reasoning_content}
            await client.chat.completions.create(model="m", messages=[*ASK, echo, *ASK])
        response = await client.responses.create(model="m", input=ASK)
        await client.responses.create(model="m", input=[*ASK, *response.output, *ASK])
        return first.reasoning_content

    engine = scripted_engine("<think>hm</think>4", "a", "b", "<think>hm</think>4", "c")
    seen = []
    render = engine.tokenizer.apply_chat_template

    def noting(messages, **options):
        seen.append([message.get("reasoning_content") for message in messages])
        return render(messages, **options)

    monkeypatch.setattr(engine.tokenizer, "apply_chat_template", noting)
    reasoning, _ = run_client(engine, body)
    assert reasoning == "hm"
    assert seen == [[None], *[[None, "hm", None]] * 2, [None], [None, "hm", None]]


def test_a_forced_call_and_an_answers_format_reach_the_engine(run_client, scripted_engine):
    tool = {"name": "weather", "input_schema": WEATHER["parameters"]}
    flat = {"type": "function", **WEATHER, "strict": True}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"format": {"type": "json_schema", "name": "n", "schema": schema}}

    async def body(server):
        client = server.openai()
        create, respond = client.chat.completions.create, client.responses.create
        format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        function = {"type": "function", "function": {"name": "weather"}}
        await create(model="m", messages=ASK, response_format=format)
        await create(model="m", messages=ASK, response_format={"type": "json_object"})
        await create(model="m", messages=ASK, extra_body={"guided_json": json.dumps(schema)})
        await create(model="m", messages=ASK, extra_body={"guided_choice": ["a.", "b"]})
        await create(model="m", messages=ASK, tools=[TOOL], tool_choice=function, parallel_tool_calls=False)
        await create(model="m", messages=ASK, tools=[TOOL], tool_choice="required")
        await respond(model="m", input="?", text=named)
        await respond(model="m", input="?", tools=[flat], tool_choice={"type": "function", "name": "weather"})
        async with server.anthropic() as other:
            ask = {"model": "m", "messages": ASK, "max_tokens": 9}
            await other.messages.create(**ask, tools=[tool], tool_choice={"type": "any"})
            await other.messages.create(
                **ask, output_config={"format": {"type": "json_schema", "schema": schema}}
            )

    engine = scripted_engine(*["a"] * 4, *[CALLS_WEATHER] * 2, "a", *[CALLS_WEATHER] * 2, "a")
    run_client(engine, body, reasoning_parser="none")
    assert all(request.sampling.model_logprobs for request in engine.requests)
    sent = [dict(request.sampling.server_only) for request in engine.requests]
    answer = {"json_schema": json.dumps(schema)}
    assert sent[:4] == [answer, {"json_schema": '{"type": "object"}'}, answer, {"regex": r"(a\.)|(b)"}]
    assert (sent[6], sent[9]) == (answer, answer)
    formats = [json.loads(sent[index]["structural_tag"])["format"] for index in (4, 5, 7, 8)]
    assert [(f["type"], f["stop_after_first"]) for f in formats] == [
        ("tags_with_separator", True),
        *[("tags_with_separator", False)] * 3,
    ]
    assert {f["tags"][0]["begin"] for f in formats} == {'<tool_call>\n{"name": "weather", "arguments": '}
    assert {json.dumps(f["tags"][0]["content"]["json_schema"]) for f in formats} == {
        json.dumps(WEATHER["parameters"])
    }


class Shout:
    """A preprocessor of messages."""

    def __call__(self, messages):
        return [m | {"content": m["content"].upper()} for m in messages if m["role"] != "system"]


def test_only_messages_of_anthropic_are_preprocessed(run_client, scripted_engine, tokenizer):
    async def body(server):
        asked = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9}
        await server.post("/messages", json.dumps(asked | {"system": "s"}))
        await server.post("/chat/completions", json.dumps(asked))

    engine = scripted_engine("a", "b")
    run_client(engine, body, message_preprocessors=["tests.agent.test_proxy_routes.Shout"])
    first, second = [tokenizer.decode(request.input_ids) for request in engine.requests]
    assert first.replace("Q", "q") == second != first
    with pytest.raises(ConfigError, match="is not a class whose objects are called"):
        run_client(engine, body, message_preprocessors=["json.dumps"])
