"""Outputs of models, and the tool calls and reasoning that are parsed from them."""

import copy
import json

import pytest

from areal_core.agent import sglang_parsers
from areal_core.agent.completion import Dialogue, read_message
from areal_core.agent.conversation import Call, Message
from areal_core.agent.errors import BadRequest
from areal_core.agent.output_parsers import (
    TOOL_FORMATS,
    by_sglang,
    check_parsers,
    parse_tool_calls,
    split_reasoning,
)
from areal_core.errors import ConfigError
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


OF_SGLANG = {
    "deepseekv3": "ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
    '```json\n{"x": 1, "s": "a}"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "ok<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"x": 1, "s": "a}"}<|tool_call_end|><|tool_calls_section_end|>',
    "interns1": 'ok<|action_start|> <|plugin|>\n{"name": "f", "parameters": {"x": 1, "s": "a}"}}<|action_end|>',
}


@pytest.mark.parametrize("parser", OF_SGLANG)
def test_formats_of_sglang_are_read_by_its_parsers(parser):
    content, calls = parse_tool_calls(OF_SGLANG[parser], parser, TOOLS)
    assert (content, [(call.name, json.loads(call.arguments)) for call in calls]) == ("ok", [CALL])
    unchanged = f"no call in {parser}"
    assert parse_tool_calls(unchanged, parser, TOOLS) == (unchanged, ())


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


def test_reasoning_formats_of_sglang_are_read_by_its_parsers():
    assert split_reasoning("◁think▷a◁/think▷b", "kimi") == ("a", "b")


def test_a_parser_that_nobody_has_is_refused(monkeypatch):
    check_parsers("qwen", "none")
    check_parsers("glm45", "kimi")
    with pytest.raises(
        ConfigError, match=r"tool_call_parser is 'no'; expected one of qwen.*apertus2509.* of SGLang"
    ):
        check_parsers("no", "none")
    monkeypatch.setattr(sglang_parsers, "parser_names", lambda: ((), ()))
    with pytest.raises(
        ConfigError, match=r"reasoning_parser is 'kimi'.*those of SGLang, which is not installed"
    ):
        check_parsers("qwen", "kimi")


def test_an_xml_parameter_without_a_type_in_its_schema_is_json_or_text():
    properties = {"x": {"enum": [1, 22]}, "y": {"anyOf": [{"type": "string"}]}, "s": {"type": "string"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    body = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in {"x": 22, "y": "a", "s": 1}.items()
    )
    _, (call,) = parse_tool_calls(
        f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>", "qwen3_coder", tools
    )
    assert json.loads(call.arguments) == {"x": 22, "y": "a", "s": "1"}


def test_lone_surrogates_in_a_call_become_the_replacement_character():
    text = '<tool_call>\n{"name": "f\\ud800", "arguments": {"\\udfff": ["a\\ud83d\\ude00\\ud83d"]}}\n</tool_call>'
    _, (call,) = parse_tool_calls(text, "qwen", TOOLS)
    assert (call.name, call.arguments) == ("f�", '{"�": ["a😀�"]}')


@pytest.mark.parametrize(
    "text", ["-" * 100_000 + "1", "not " * 100_000 + "1", f"[f(x={'-' * 3000}1)]", "[f(x={[]: 1})]"]
)
def test_python_that_is_nested_too_deeply_or_no_literal_is_content(text):
    content, calls = parse_tool_calls(text, "pythonic", TOOLS)
    assert (content, list(calls)) == (text, [])
