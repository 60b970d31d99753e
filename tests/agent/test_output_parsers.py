"""Outputs of models, and the tool calls and reasoning that are parsed from them."""

import copy
import json

import pytest

from areal_core.agent.completion import Dialogue, read_message
from areal_core.agent.conversation import Call, Message
from areal_core.agent.errors import BadRequest
from areal_core.agent.output_parsers import TOOL_FORMATS, parse_tool_calls, split_reasoning
from areal_core.rollout.types import ModelResponse, Sampling

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
CALL = ("f", {"x": 1, "s": "a}"})

SPELLINGS = {
    "qwen": 'ok<tool_call>\n{"name": "f", "arguments": {"x": 1, "s": "a}"}}\n</tool_call>',
    "hermes": 'ok<tool_call>{"name": "f", "arguments": {"x": 1, "s": "a}"}}</tool_call>',
    "qwen3_coder": "ok<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\na}\n</parameter>\n</function></tool_call>",
    "mistral": 'ok[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1, "s": "a}"}}]'.replace("}}]", "}}]"),
    "llama3": '<|python_tag|>{"name": "f", "parameters": {"x": 1, "s": "a}"}}',
    "pythonic": "[f(x=1, s='a}')]",
}


@pytest.mark.parametrize("parser", SPELLINGS)
def test_a_call_is_read_in_each_spelling(parser):
    content, calls = parse_tool_calls(SPELLINGS[parser], parser, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [CALL]
    assert content == ("ok" if SPELLINGS[parser].startswith("ok") else "")


@pytest.mark.parametrize(
    ("parser", "two"),
    [
        ("qwen", SPELLINGS["qwen"] + "\n" + SPELLINGS["hermes"].removeprefix("ok")),
        ("mistral", 'ok[TOOL_CALLS][{"name": "f", "arguments": {"x": 1, "s": "a}"}}, '
                    '{"name": "f", "arguments": {"x": 1, "s": "a}"}}]'),
        ("llama3", SPELLINGS["llama3"] + "; " + SPELLINGS["llama3"].removeprefix("<|python_tag|>")),
        ("pythonic", "[f(x=1, s='a}'), f(x=1, s='a}')]"),
    ],
)  # fmt: skip
def test_two_calls_of_one_turn_have_ids_of_their_own(parser, two):
    _, calls = parse_tool_calls(two, parser, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [CALL, CALL]
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("parser", TOOL_FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "just text",
        '<tool_call>{"name": "f", "argu',
        '<tool_call>{"name": 3}</tool_call>',
        "[1, f(2)]",
        "{}",
        "",
    ],
)
def test_what_is_no_call_stays_in_the_content(parser, text):
    assert parse_tool_calls(text, parser, TOOLS) == (text, ())


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        ("qwen3", "<think>a</think>\n\nb", ("a", "b")),
        ("qwen3", "a</think>b", ("a", "b")),  # the prompt opened it
        ("qwen3", "<think>cut", ("cut", "")),
        ("qwen3", "b", (None, "b")),
        ("deepseek-r1", "cut", ("cut", "")),
        ("none", "<think>a</think>b", (None, "<think>a</think>b")),
    ],
)
def test_reasoning_is_separated_from_the_answer(parser, text, expected):
    assert split_reasoning(text, parser) == expected


def response(tokenizer, text: str, stop_reason: str = "stop") -> ModelResponse:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    n = len(tokens)
    return ModelResponse(
        input_tokens=[tokenizer.convert_tokens_to_ids("<|assistant|>")],
        output_tokens=tokens,
        output_logprobs=[-1.0] * n,
        output_versions=[0] * n,
        stop_reason=stop_reason,
    )


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


@pytest.mark.parametrize(
    ("output", "content", "calls"),
    [
        ('ok<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "ok", [("f", '{"x": 1}')]),
        ("no call", "no call", []),
        ('ok<tool_call>{"name": </tool_call>', 'ok<tool_call>{"name": </tool_call>', []),
    ],
)
def test_the_tokenizers_own_template_can_read_the_output(tokenizer, output, content, calls):
    reader = copy.copy(tokenizer)
    reader.response_template = RESPONSE_TEMPLATE
    sampling = Sampling(stop_token_ids=[tokenizer.eos_token_id])
    dialogue = Dialogue(tokenizer=reader, sampling=sampling, tool_call_parser="template")
    call = Call(messages=(Message("user", "?"),), tools=tuple(TOOLS))
    message = read_message(response(tokenizer, f"{output}<|end|>"), call, dialogue)
    assert message.content == content
    assert [(c.name, c.arguments) for c in message.tool_calls] == calls


def test_a_tokenizer_without_such_a_template_is_reported(tokenizer):
    dialogue = Dialogue(tokenizer=tokenizer, sampling=Sampling(), tool_call_parser="template")
    with pytest.raises(BadRequest, match="the tokenizer has no response_template"):
        read_message(response(tokenizer, "ok"), Call(messages=(), tools=tuple(TOOLS)), dialogue)


def test_tool_calls_are_not_looked_for_where_no_tool_was_offered(tokenizer):
    dialogue = Dialogue(tokenizer=tokenizer, sampling=Sampling(stop_token_ids=[tokenizer.eos_token_id]))
    message = read_message(response(tokenizer, SPELLINGS["hermes"] + "<|end|>"), Call(messages=()), dialogue)
    assert message == Message("assistant", SPELLINGS["hermes"])
