"""Outputs that a client requires: grammars, and what a real SGLang server samples with them."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_core.agent.completion import Dialogue, sampling_of
from areal_core.agent.conversation import Call, Message, Required
from areal_core.agent.errors import BadRequest
from areal_core.agent.grammar import server_parameters
from areal_core.agent.output_parsers import parse_tool_calls
from areal_core.rollout.types import ModelRequest, Sampling
from tests.rollout.sampled import ask, logprobs_of

PARAMETERS = {
    "type": "object",
    "properties": {"x": {"enum": [1, 22]}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")
)
ANSWER = {"type": "json_schema", "json_schema": PARAMETERS}
ASK = (Message("user", "?"),)


def format_of(required: Required, tools=TOOLS, parser="qwen", reasoning="none", opened=False):
    call = Call(messages=ASK, tools=tools, required=required)
    parameters = server_parameters(call, parser, reasoning, opened)
    if "structural_tag" not in parameters:
        return parameters
    return json.loads(parameters["structural_tag"])["format"]


def forced(*names: str, single: bool = False) -> dict:
    tags = [
        {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
            "content": ANSWER,
            "end": "}\n</tool_call>",
        }
        for name in names
    ]
    options = {"separator": "\n", "at_least_one": True, "stop_after_first": single}
    return {"type": "tags_with_separator", "tags": tags, **options}


def test_each_requirement_is_a_grammar():
    assert format_of(Required()) == {}
    assert format_of(Required(grammar={"regex": "a+"})) == {"regex": "a+"}
    assert format_of(Required(schema=PARAMETERS), tools=()) == {"json_schema": json.dumps(PARAMETERS)}
    assert format_of(Required(functions=("f", "g"))) == forced("f", "g")
    assert format_of(Required(functions=("g",), single_call=True)) == forced("g", single=True)
    either = {"type": "or", "elements": [ANSWER, forced("f", "g")]}
    assert format_of(Required(schema=PARAMETERS)) == either


def test_a_model_may_reason_before_the_required_output():
    gap = {"type": "regex", "pattern": r"\n{0,2}"}
    thought = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
    closed = format_of(Required(schema=PARAMETERS), tools=(), reasoning="qwen3")
    assert closed == {
        "type": "or",
        "elements": [ANSWER, {"type": "sequence", "elements": [thought, gap, ANSWER]}],
    }
    opened = format_of(Required(schema=PARAMETERS), tools=(), reasoning="qwen3", opened=True)
    assert opened == {"type": "sequence", "elements": [thought | {"begin": ""}, gap, ANSWER]}


def test_a_format_without_a_grammar_is_refused_with_the_field():
    with pytest.raises(BadRequest, match="no grammar for calls in the format 'pythonic'"):
        format_of(Required(functions=("f",)), parser="pythonic")


@pytest.fixture(scope="module")
def server(tiny_model, sglang):
    with sglang(tiny_model, "--constrained-json-disable-any-whitespace") as started:
        yield started.server


def sample(server, tokenizer, text: str, required: Required, parser="qwen", reasoning="none", tools=TOOLS):
    """Return the text that a real server samples, and the completion."""
    dialogue = Dialogue(
        tokenizer=tokenizer,
        sampling=Sampling(max_new_tokens=300, stop_token_ids=[tokenizer.eos_token_id]),
        tool_call_parser=parser,
        reasoning_parser=reasoning,
    )
    prompt = tokenizer.encode(text)
    sampling = sampling_of(Call(messages=ASK, tools=tools, required=required), prompt, dialogue)

    [response] = ask([server], [ModelRequest(input_ids=prompt, sampling=sampling)])
    return tokenizer.decode(response.output_tokens, skip_special_tokens=True), response


@pytest.mark.long
@pytest.mark.sglang
@pytest.mark.parametrize("parser", ["qwen", "llama3", "qwen3_coder", "interns1"])
def test_a_real_server_samples_a_call_that_the_parser_reads(server, tokenizer, parser):
    required = Required(functions=("g",), single_call=True)
    text, response = sample(server, tokenizer, "<|user|>?<|end|><|assistant|>", required, parser)
    content, calls = parse_tool_calls(text, parser, TOOLS)
    assert [(call.name, json.loads(call.arguments)["x"] in (1, 22)) for call in calls] == [("g", True)]
    assert (content, response.stop_reason) == ("", "stop")


@pytest.mark.long
@pytest.mark.sglang
@pytest.mark.parametrize("reasoning", ["none", "qwen3"])
@pytest.mark.parametrize("opening", ["", "<think>"])
def test_a_real_server_samples_the_answer_with_the_models_logprobs(
    server, tokenizer, tiny_model, reasoning, opening
):
    prompt = f"<|user|>?<|end|><|assistant|>{opening}"
    text, response = sample(
        server, tokenizer, prompt, Required(schema=PARAMETERS), reasoning=reasoning, tools=()
    )
    if response.stop_reason == "stop":  # a random model may reason up to its limit
        assert json.loads(text.partition("</think>")[2] or text)["x"] in (1, 22)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    expected = logprobs_of(model, response.input_tokens, response.output_tokens)
    torch.testing.assert_close(torch.tensor(response.output_logprobs), expected, atol=5e-6, rtol=0)
