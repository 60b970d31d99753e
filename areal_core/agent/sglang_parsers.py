"""SGLang's parsers of tool calls and reasoning, for formats that `output_parsers` does not read.

SGLang is imported by the first call: it takes seconds and is not in the light install.
"""

import importlib.util
from functools import cache
from typing import Any

from areal_core.agent.errors import BadRequest

Tools = tuple[dict[str, Any], ...]


@cache
def parser_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return SGLang's names of tool-call parsers and of reasoning parsers; none without SGLang."""
    if importlib.util.find_spec("sglang") is None:
        return (), ()
    from sglang.srt.function_call.parser_names import TOOL_CALL_PARSER_NAMES
    from sglang.srt.parser.reasoning_parser_names import REASONING_PARSER_NAMES

    # `response_template` is a feature of the tokenizer, which "template" reads.
    return tuple(n for n in TOOL_CALL_PARSER_NAMES if n != "response_template"), tuple(REASONING_PARSER_NAMES)


def find_calls(text: str, parser: str, tools: Tools) -> tuple[str, list[tuple[str, str]]]:
    """Return the text without its calls, and name and JSON arguments of each call.

    Calls of tools that were not offered are among them.
    """
    from sglang.srt.environ import envs

    with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
        content, found = function_parser(parser, tools).parse_non_stream(text)
    return content, [(call.name, call.parameters) for call in found if call.name]


def split_reasoning(text: str, parser: str) -> tuple[str | None, str]:
    """Return the reasoning (None without any) and the rest of the text."""
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    reasoning, content = ReasoningParser(parser, stream_reasoning=False).parse_non_stream(text)
    return (reasoning or "").strip() or None, (content or "").lstrip("\n")


def call_format(parser: str, tools: Tools, single_call: bool) -> dict[str, Any]:
    """Return the format, for a structural tag of xgrammar, of one or more calls of these tools.

    Raises BadRequest if SGLang has none for this parser.
    """
    found = None
    if parser in parser_names()[0]:
        found = function_parser(parser, tools).get_structure_constraint(
            "required", parallel_tool_calls=not single_call
        )
    match found:
        case ("structural_tag", tag):
            shown: dict[str, Any] = tag.model_dump(by_alias=True)
            return shown.get("format") or joined_tags(shown["structures"], "\n", single_call)
    raise BadRequest(
        f"SGLang has no grammar for calls in the format {parser!r} (rollout.agent.tool_call_parser): "
        "tool_choice cannot require one, and response_format is for requests without tools"
    )


def joined_tags(structures: list[dict[str, Any]], separator: str, single_call: bool) -> dict[str, Any]:
    """Return the format of one or more of these structures, each a begin, a schema and an end."""
    return {
        "type": "tags_with_separator",
        "tags": [
            {
                "type": "tag",
                "begin": structure["begin"],
                "content": {"type": "json_schema", "json_schema": structure["schema"]},
                "end": structure["end"],
            }
            for structure in structures
        ],
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": single_call,
    }


def function_parser(parser: str, tools: Tools) -> Any:
    """Return SGLang's parser; tools are strict unless the client says otherwise."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    described = [Tool(type="function", function={"strict": True, **tool["function"]}) for tool in tools]
    return FunctionCallParser(described, parser)
