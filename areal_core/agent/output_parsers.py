"""Parsers of sampled text: content, reasoning and tool calls.

Each tool-call format is one function `text, tools -> (content, calls)`. Text that does not parse
stays in the content, where both the agent and the model's next turn can see it. The formats here
are the common ones, read without SGLang and equal to its parsers; it reads all others.
"""

import ast
import json
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal_core.agent import sglang_parsers
from areal_core.agent.conversation import ToolCall
from areal_core.errors import ConfigError

Tools = Sequence[dict[str, Any]]
Found = tuple[str, list[tuple[str, dict[str, Any]]]]  # remaining text; (name, arguments) per call

TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
XML_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ToolFormat:
    """The tool-call format of a model family.

    `special`: marked by special tokens. `spelling`: what is before the arguments of a call, after
    them, and between two calls; empty where they are not a single JSON object in plain text.
    """

    parse: Callable[[str, Tools], Found]
    special: bool = False
    spelling: tuple[str, str, str] = ("", "", "")


def split_reasoning(text: str, parser: str) -> tuple[str | None, str]:
    """Return the reasoning (None without any) and the rest of the text.

    For `qwen3` the text opens `<think>`, or closes one that the prompt has opened; `deepseek-r1`
    always starts inside, so that an answer that is truncated before `</think>` is all reasoning.
    """
    if parser == "none":
        return None, text
    if parser not in REASONING_PARSERS:
        return sglang_parsers.split_reasoning(text, parser)
    before, closed, after = text.partition("</think>")
    opened = before.lstrip().startswith("<think>")
    if not closed and not opened and parser != "deepseek-r1":
        return None, text
    return before.lstrip().removeprefix("<think>").strip(), after.lstrip("\n")


def parse_tool_calls(text: str, parser: str, tools: Tools) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text without its tool calls, and the calls, with new ids.

    A call of a tool that was not offered counts as a call, too.
    """
    parse = TOOL_FORMATS[parser].parse if parser in TOOL_FORMATS else partial(by_sglang, parser)
    content, found = parse(text, tools)
    if not found:
        return text, ()
    return content.strip(), with_ids(found)


def by_sglang(parser: str, text: str, tools: Tools) -> Found:
    """Return what SGLang's parser of this name finds; nothing if arguments are not an object."""
    content, calls = sglang_parsers.find_calls(text, parser, tuple(tools))
    found = [(name, json_value(arguments)) for name, arguments in calls]
    return (content, found) if all(isinstance(arguments, dict) for _, arguments in found) else (text, [])


def shows_special_tokens(parser: str) -> bool:
    """Return whether a format needs the text of special tokens; SGLang's formats may."""
    return parser not in TOOL_FORMATS or TOOL_FORMATS[parser].special


def call_spelling(parser: str) -> tuple[str, str, str]:
    """Return `ToolFormat.spelling`; empty texts for a format of SGLang."""
    return TOOL_FORMATS[parser].spelling if parser in TOOL_FORMATS else ("", "", "")


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise ConfigError for a parser that neither this module nor SGLang has."""
    ours = {
        "tool_call_parser": (tool_call_parser, (*TOOL_FORMATS, "template")),
        "reasoning_parser": (reasoning_parser, REASONING_PARSERS),
    }
    for index, (option, (name, known)) in enumerate(ours.items()):
        if name in known:
            continue
        if name not in (of_sglang := sglang_parsers.parser_names()[index]):
            others = [other for other in of_sglang if other not in known]
            more = f"{', '.join(others)} of SGLang" if others else "those of SGLang, which is not installed"
            raise ConfigError(
                f"rollout.agent.{option} is {name!r}; expected one of {', '.join(known)}, or {more}"
            )


def with_ids(found: Iterable[tuple[str, dict[str, Any]]]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(f"call_{uuid.uuid4().hex[:24]}", encodable(name), dump(arguments))
        for name, arguments in found
    )


def dump(arguments: Any) -> str:
    """Return arguments as canonical JSON text, so that a client's echo of them compares equal."""
    return json.dumps(encodable(arguments), ensure_ascii=False)


def encodable(value: Any) -> Any:
    """Return a JSON value in which lone surrogates, which UTF-8 cannot encode, are U+FFFD."""
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [encodable(item) for item in value]
        case dict():
            return {encodable(key): encodable(item) for key, item in value.items()}
    return value


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
    except (SyntaxError, ValueError, TypeError, AssertionError, RecursionError, MemoryError):
        return text, []  # the last two of Python's parser, for text that is nested deeply


def take_out(
    pattern: re.Pattern[str],
    text: str,
    calls_in: Callable[[str], Sequence[tuple[str, dict[str, Any]] | None]],
) -> Found:
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
    except (ValueError, RecursionError):
        return None


def python_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Return `f(x=1)` as a name and literal arguments.

    Raises ValueError or AssertionError otherwise.
    """
    assert isinstance(node, ast.Call)
    assert not node.args
    return ast.unparse(node.func), {str(k.arg): ast.literal_eval(k.value) for k in node.keywords if k.arg}


def typed(value: str, function: str, parameter: str, tools: Tools) -> Any:
    for tool in tools:
        match tool["function"]:
            case {"name": name, "parameters": {"properties": dict(properties)}} if name == function:
                match properties.get(parameter):
                    case {"type": "string"}:
                        return value
    parsed = json_value(value)
    return value if parsed is None else parsed


TAGGED_JSON = ToolFormat(
    tagged_json, spelling=('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n")
)
TOOL_FORMATS = {
    "qwen": TAGGED_JSON,
    "qwen25": TAGGED_JSON,
    "hermes": TAGGED_JSON,
    "qwen3_coder": ToolFormat(tagged_xml),
    "llama3": ToolFormat(bare_json, special=True, spelling=('{"name": "NAME", "parameters": ', "}", "; ")),
    "mistral": ToolFormat(marked_list, special=True),
    "pythonic": ToolFormat(python_list),
    "none": ToolFormat(lambda text, tools: (text, [])),
}
REASONING_PARSERS = ("qwen3", "deepseek-r1", "none")
