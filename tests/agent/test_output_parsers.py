"""Outputs of models, and the tool calls and reasoning that are parsed from them."""

import copy

import pytest

from areal_core.agent import sglang_parsers
from areal_core.agent.completion import Dialogue, read_message
from areal_core.agent.conversation import Call, Message
from areal_core.agent.output_parsers import TOOL_FORMATS, by_sglang, parse_tool_calls, split_reasoning
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


SPELT_BY_SGLANG = SPELLINGS | {
    "qwen25": SPELLINGS["qwen"] + "\n" + SPELLINGS["qwen"].removeprefix("ok"),
    "llama3": SPELLINGS["llama3"] + ";" + SPELLINGS["llama3"].removeprefix("<|python_tag|>"),
    "mistral": 'ok[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1, "s": "a}"}}, {"name": "g", "arguments": {}}]',
    "pythonic": "[f(x=1, s='a}'), f(x=2, s='')]",
}


@pytest.mark.parametrize("parser", SPELT_BY_SGLANG)
def test_our_formats_are_read_as_sglang_reads_them(parser):
    text = SPELT_BY_SGLANG[parser]
    ours, our_calls = TOOL_FORMATS[parser].parse(text, TOOLS)
    theirs, their_calls = by_sglang(parser, text, TOOLS)
    assert (ours.strip(), our_calls) == (theirs.strip(), their_calls)
    assert our_calls[0] == CALL
    for other in ("no call", "<tool_call>{", "[1]"):
        assert by_sglang(parser, other, TOOLS)[1] == TOOL_FORMATS[parser].parse(other, TOOLS)[1] == []


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("qwen3", "<think>a</think>\n\nb"),
        ("qwen3", "<think>cut"),
        ("qwen3", "b"),
        ("deepseek-r1", "a</think>b"),
        ("deepseek-r1", "cut"),
    ],
)
def test_reasoning_is_separated_as_sglang_does(parser, text):
    reasoning, content = sglang_parsers.split_reasoning(text, parser)
    assert split_reasoning(text, parser) == (reasoning, content)


@pytest.mark.parametrize(
    "text", ["-" * 100_000 + "1", "not " * 100_000 + "1", f"[f(x={'-' * 3000}1)]", "[f(x={[]: 1})]"]
)
def test_python_that_is_nested_too_deeply_or_no_literal_is_content(text):
    content, calls = parse_tool_calls(text, "pythonic", TOOLS)
    assert (content, list(calls)) == (text, [])
