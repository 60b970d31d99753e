"""Parsers of sampled text: content, reasoning and tool calls.

Each tool-call format is one function `text, tools -> (content, calls)`. Text that does not parse
stays in the content, where both the agent and the model's next turn can see it.
"""

import ast
import json
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from areal_core.agent.conversation import ToolCall

Tools = Sequence[dict[str, Any]]
Found = tuple[str, list[tuple[str, dict[str, Any]]]]  # remaining text; (name, arguments) per call

TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
XML_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ToolFormat:
    """The tool-call format of a model family; `special`: marked by special tokens."""

    parse: Callable[[str, Tools], Found]
    special: bool = False


def split_reasoning(text: str, parser: str) -> tuple[str | None, str]:
    """Return the reasoning (None without any) and the rest of the text.

    For `qwen3` the text opens `<think>`, or closes one that the prompt has opened; `deepseek-r1`
    always starts inside, so that an answer that is truncated before `</think>` is all reasoning.
    """
    if parser == "none":
        return None, text
    before, closed, after = text.partition("</think>")
    opened = before.lstrip().startswith("<think>")
    if not closed and not opened and parser != "deepseek-r1":
        return None, text
    return before.lstrip().removeprefix("<think>").strip(), after.lstrip("\n")


def parse_tool_calls(text: str, parser: str, tools: Tools) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text without its tool calls, and the calls, with new ids.

    A call of a tool that was not offered counts as a call, too.
    """
    content, found = TOOL_FORMATS[parser].parse(text, tools)
    if not found:
        return text, ()
    return content.strip(), with_ids(found)


def with_ids(found: Iterable[tuple[str, dict[str, Any]]]) -> tuple[ToolCall, ...]:
    """Return names and arguments as calls with unique ids."""
    return tuple(
        ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, dump(arguments)) for name, arguments in found
    )


def dump(arguments: Any) -> str:
    """Return arguments as canonical JSON text, so that a client's echo of them compares equal."""
    return json.dumps(arguments, ensure_ascii=False)


def tagged_json(text: str, tools: Tools) -> Found:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen 2.5 and 3, Hermes)."""
    return take_out(TAGGED, text, lambda block: [named_call(block)])


def tagged_xml(text: str, tools: Tools) -> Found:
    """`<tool_call><function=f><parameter=x>1</parameter></function></tool_call>` (Qwen 3 Coder)."""

    def calls(block: str) -> list[tuple[str, dict[str, Any]] | None]:
        return [
            (name, {key: typed(value, name, key, tools) for key, value in XML_PARAMETER.findall(body)})
            for name, body in XML_FUNCTION.findall(block)
        ]

    return take_out(TAGGED, text, calls)


def bare_json(text: str, tools: Tools) -> Found:
    """`{"name": ..., "parameters": {...}}`, optional `<|python_tag|>`, split by `;` (Llama 3)."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    calls = [named_call(part) for part in re.split(r"(?<=\})\s*;\s*(?=\{)", body)]
    return ("", [call for call in calls if call]) if all(calls) else (text, [])


def marked_list(text: str, tools: Tools) -> Found:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]` (Mistral)."""
    content, marked, body = text.partition("[TOOL_CALLS]")
    parsed = json_value(body) if marked else None
    calls = [named_call(json.dumps(item)) for item in parsed] if isinstance(parsed, list) else [None]
    return (content, [call for call in calls if call]) if all(calls) else (text, [])


def python_list(text: str, tools: Tools) -> Found:
    """`[f(x=1), g(y="a")]`, and nothing else (Llama 4 and others; "pythonic")."""
    try:
        listed = ast.parse(text.strip(), mode="eval").body
        assert isinstance(listed, ast.List)
        return "", [python_call(item) for item in listed.elts]
    except (SyntaxError, ValueError, AssertionError):
        return text, []


def no_calls(text: str, tools: Tools) -> Found:
    """Everything is content."""
    return text, []


def take_out(
    pattern: re.Pattern[str],
    text: str,
    calls_in: Callable[[str], Sequence[tuple[str, dict[str, Any]] | None]],
) -> Found:
    """Return the text without the blocks whose calls parse, and those calls."""
    rest, found, end = [], [], 0
    for match in pattern.finditer(text):
        calls = [call for call in calls_in(match.group(1)) if call]
        found += calls
        rest.append(text[end : match.start() if calls else match.end()])
        end = match.end()
    return "".join([*rest, text[end:]]), found


def named_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a JSON call (Llama: "parameters"); None for other text."""
    match json_value(text):
        case {"name": str(name), "arguments": dict(arguments)} | {
            "name": str(name),
            "parameters": dict(arguments),
        }:
            return name, arguments
        case {"name": str(name), **rest} if not rest:
            return name, {}
    return None


def json_value(text: str) -> Any:
    """Return the JSON value; None for text that is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def python_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Return `f(x=1)` as a name and literal arguments.

    Raises ValueError or AssertionError otherwise.
    """
    assert isinstance(node, ast.Call)
    assert not node.args
    return ast.unparse(node.func), {str(k.arg): ast.literal_eval(k.value) for k in node.keywords if k.arg}


def typed(value: str, function: str, parameter: str, tools: Tools) -> Any:
    """Return an XML parameter: a string by the tool's schema, else JSON if it parses."""
    for tool in tools:
        match tool["function"]:
            case {"name": name, "parameters": {"properties": dict(properties)}} if name == function:
                if parameter in properties and properties[parameter]["type"] == "string":
                    return value
    parsed = json_value(value)
    return value if parsed is None else parsed


TOOL_FORMATS = {
    "qwen": ToolFormat(tagged_json),
    "qwen25": ToolFormat(tagged_json),
    "hermes": ToolFormat(tagged_json),
    "qwen3_coder": ToolFormat(tagged_xml),
    "llama3": ToolFormat(bare_json, special=True),
    "mistral": ToolFormat(marked_list, special=True),
    "pythonic": ToolFormat(python_list),
    "none": ToolFormat(no_calls),
}
REASONING_PARSERS = ("qwen3", "deepseek-r1", "none")
