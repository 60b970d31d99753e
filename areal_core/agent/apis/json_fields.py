"""JSON of a client, parsed by field: a typed value, or an error with the field and its value."""

import inspect
import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from areal_core.agent.conversation import Required
from areal_core.agent.errors import BadRequest
from areal_core.agent.output_parsers import encodable, json_value

T = TypeVar("T")
# Options of `gconfig`; then those of SGLang only, each with the value that has no effect.
SAMPLING_KINDS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "frequency_penalty": float,
    "ignore_eos": bool,
    "stop_token_ids": list,
}
SERVER_ONLY: dict[str, tuple[type, Any]] = {
    "presence_penalty": (float, 0),
    "repetition_penalty": (float, 1),
    "min_p": (float, 0),
    "logit_bias": (dict, {}),
}
REQUIRED: Any = object()
# Arguments of `apply_chat_template` that are not variables of a template.
OURS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
KINDS = {
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse the body as a JSON object, with U+FFFD for lone surrogates. Raises BadRequest."""
    try:
        parsed = encodable(json.loads(body))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise BadRequest(f"the body is {shown(parsed)}; expected a JSON object")
    return parsed


def take(fields: dict[str, Any], name: str, kind: type[T], default: Any = REQUIRED) -> Any:
    """Return the value of a field, the default if it is absent or null. Raises BadRequest."""
    value = fields.get(name)
    if value is None:
        if default is REQUIRED:
            raise BadRequest(f"{name} is missing; expected {KINDS[kind]}")
        return default
    is_right = isinstance(value, (int, float) if kind is float else kind)
    if not is_right or (kind in (int, float) and isinstance(value, bool)):
        raise BadRequest(f"{name} is {shown(value)}; expected {KINDS[kind]}")
    return value


def take_objects(fields: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a list of objects, empty if the field is absent. Raises BadRequest."""
    items = take(fields, name, list, [])
    for item in items:
        if not isinstance(item, dict):
            raise BadRequest(f"{name} contains {shown(item)}; expected objects")
    return items


def text_of(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return the text of a message's content, joining its parts of these kinds.

    Raises BadRequest for other content, such as images.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} is {shown(content)}; expected a text or a list of parts")
    texts = []
    for part in content:
        match part:
            case {"type": kind, "text": str(text)} if kind in kinds:
                texts.append(text)
            case _:
                raise BadRequest(f"{where} contains {shown(part)}; only text is supported")
    return "".join(texts)


def shown(value: Any) -> str:
    """Return a value for a message, at most 80 characters of it."""
    return repr(value)[:80]


def sampling_fields(fields: dict[str, Any], *length_names: str) -> dict[str, Any]:
    """Return the client's sampling options by the names of `Sampling`. Raises BadRequest.

    The first of `length_names` that is given sets the length. `server_only` has the options that
    `gconfig` lacks.
    """
    found = {name: take(fields, name, kind, None) for name, kind in SAMPLING_KINDS.items()}
    found["min_new_tokens"] = take(fields, "min_tokens", int, None)
    lengths = (take(fields, name, int, None) for name in length_names)
    found["max_new_tokens"] = next((length for length in lengths if length is not None), None)
    limits = {"temperature": 0, "top_p": 0, "max_new_tokens": 1, "min_new_tokens": 0}
    for name, least in limits.items():
        if found[name] is not None and found[name] < least:
            raise BadRequest(f"{name} is {found[name]}; expected at least {least}")
    if not all(type(token) is int for token in found["stop_token_ids"] or ()):
        raise BadRequest(f"stop_token_ids is {shown(found['stop_token_ids'])}; expected token ids")
    server_only = {
        name: value
        for name, (kind, neutral) in SERVER_ONLY.items()
        if (value := take(fields, name, kind, neutral)) != neutral
    }
    stop = stop_texts(fields)
    chosen = {"server_only": server_only or None, "stop": stop or None}
    return {name: value for name, value in (found | chosen).items() if value is not None}


def stop_texts(fields: dict[str, Any]) -> list[str]:
    name = "stop_sequences" if "stop_sequences" in fields else "stop"
    given = fields.get(name)
    texts = take(fields, name, list, []) if isinstance(given, list) else [take(fields, name, str, "")]
    for text in texts:
        if not isinstance(text, str):
            raise BadRequest(f"{name} contains {shown(text)}; expected texts")
    return [text for text in texts if text]


def template_options(fields: dict[str, Any], **variables: Any) -> dict[str, Any]:
    """Return variables of the template: those given and not None, and `chat_template_kwargs`.

    Raises BadRequest.
    """
    options = take(fields, "chat_template_kwargs", dict, {})
    if not_of_template := sorted(options.keys() & OURS):
        raise BadRequest(f"chat_template_kwargs has {', '.join(not_of_template)}, which the proxy sets")
    return {name: value for name, value in variables.items() if value is not None} | options


def required_output(
    fields: dict[str, Any],
    schema: Any = None,
    functions: tuple[str, ...] = (),
    single_call: bool = False,
) -> Required:
    """Return what the output must be, of an API's own fields and of `json_schema`, `regex`, ...

    A forced call precedes an answer's schema, as in OpenAI's API. Raises BadRequest for two
    grammars.
    """
    grammars: dict[str, Any] = {} if schema is None else {"response_format": schema}
    for name in ("json_schema", "guided_json"):
        if fields.get(name) is not None:
            grammars[name] = schema = schema_of(fields[name], name)
    texts: dict[str, str] = {}
    for name in ("regex", "guided_regex", "ebnf"):
        if fields.get(name) is not None:
            grammars[name] = texts[name.removeprefix("guided_")] = take(fields, name, str)
    if options := take(fields, "guided_choice", list, []):
        grammars["guided_choice"] = texts["regex"] = "|".join(f"({re.escape(str(text))})" for text in options)
    if functions and texts:
        grammars["tool_choice"] = functions
    if len(grammars) > 1:
        raise BadRequest(f"{' and '.join(grammars)} are given, and the output can follow only one of them")
    return Required(schema=schema, functions=functions, single_call=single_call, grammar=texts)


def schema_of(value: Any, name: str) -> Any:
    """Return a JSON schema that is given as an object or as its text. Raises BadRequest."""
    schema = json_value(value) if isinstance(value, str) else value
    if not isinstance(schema, dict):
        raise BadRequest(f"{name} is {shown(value)}; expected a JSON schema")
    return schema


def forced_functions(
    choice: str | None, name: str | None, offered: Sequence[dict[str, Any]]
) -> tuple[str, ...]:
    """Return the functions of which one must be called: all, the named one, or none.

    Args:
        choice: "required" or "any" for all of them, "function" or "tool" for `name`.

    Raises:
        BadRequest: another choice, or a function that is not offered.
    """
    names = tuple(tool["function"]["name"] for tool in offered)
    if choice in (None, "auto", "none"):
        return ()
    if choice in ("required", "any"):
        wanted = names
    elif choice in ("function", "tool"):
        wanted = (name,) if name in names else ()
    else:
        raise BadRequest(f"tool_choice is {shown(choice)}; expected auto, none, required or a function")
    if not wanted:
        raise BadRequest(
            f"tool_choice requires {name or 'a call'}, and the tools are {', '.join(names) or 'none'}"
        )
    return tuple(str(one) for one in wanted)


def sse(event: dict[str, Any] | str, name: str = "") -> bytes:
    data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
    return f"{f'event: {name}' + chr(10) if name else ''}data: {data}\n\n".encode()
