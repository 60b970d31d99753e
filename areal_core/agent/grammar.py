"""Grammars for required outputs: a JSON answer, a call of a function, or both.

They are sampling parameters of SGLang servers. A model may reason before the required output if
`rollout.agent.reasoning_parser` marks reasoning by <think>.
"""

import json
from typing import Any

from areal_core.agent.conversation import Call, Required
from areal_core.agent.output_parsers import REASONING_PARSERS, call_spelling
from areal_core.agent.sglang_parsers import call_format, joined_tags

ANY_OBJECT = {"type": "object"}


def server_parameters(
    call: Call, tool_call_parser: str, reasoning_parser: str, opened: bool
) -> dict[str, str]:
    """Return SGLang's sampling parameters for the required output of a call.

    Args:
        call: the client's request.
        tool_call_parser, reasoning_parser: formats of the model.
        opened: the prompt ends with <think>.

    Raises:
        BadRequest: the model's format of tool calls cannot be forced.
    """
    required = call.required
    if required.grammar:
        return dict(required.grammar)
    wanted = output_format(call, tool_call_parser)
    if wanted is None:
        return {}
    reasons = reasoning_parser in REASONING_PARSERS and reasoning_parser != "none"
    if not reasons and wanted["type"] == "json_schema":
        return {"json_schema": json.dumps(wanted["json_schema"])}
    format = after_reasoning(wanted, opened) if reasons else wanted
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": format})}


def output_format(call: Call, tool_call_parser: str) -> dict[str, Any] | None:
    """Return the required output as a format of xgrammar's structural tags; None for any text.

    With a schema, a call of an offered tool may take the place of the answer.
    """
    required = call.required
    answer = {"type": "json_schema", "json_schema": required.schema}
    if required.functions:
        return forced_calls(call.tools, required, tool_call_parser)
    if required.schema is None:
        return None
    if not call.tools:
        return answer
    return {"type": "or", "elements": [answer, forced_calls(call.tools, required, tool_call_parser)]}


def forced_calls(
    tools: tuple[dict[str, Any], ...], required: Required, tool_call_parser: str
) -> dict[str, Any]:
    names = required.functions or tuple(tool["function"]["name"] for tool in tools)
    chosen = tuple(tool for tool in tools if tool["function"]["name"] in names)
    begin, end, separator = call_spelling(tool_call_parser)
    if not begin:
        return call_format(tool_call_parser, chosen, required.single_call)
    structures = [
        {
            "begin": begin.replace("NAME", tool["function"]["name"]),
            "schema": tool["function"].get("parameters") or ANY_OBJECT,
            "end": end,
        }
        for tool in chosen
    ]
    return joined_tags(structures, separator, required.single_call)


def after_reasoning(wanted: dict[str, Any], opened: bool) -> dict[str, Any]:
    gap = {"type": "regex", "pattern": r"\n{0,2}"}
    thought = {
        "type": "tag",
        "begin": "" if opened else "<think>",
        "content": {"type": "any_text"},
        "end": "</think>",
    }
    reasoned = {"type": "sequence", "elements": [thought, gap, wanted]}
    return reasoned if opened else {"type": "or", "elements": [wanted, reasoned]}
