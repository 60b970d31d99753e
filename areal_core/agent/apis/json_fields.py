"""JSON of a client, parsed by field: a typed value, or an error with the field and its value."""

import inspect
import json
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from areal_core.agent.errors import BadRequest

T = TypeVar("T")
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
    """Parse the body as a JSON object. Raises BadRequest."""
    try:
        parsed = json.loads(body)
    except ValueError as error:
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


def refuse(fields: dict[str, Any], name: str, harmless: tuple[Any, ...], why: str) -> None:
    """Raise BadRequest if a field has a value that would be ignored."""
    if name in fields and fields[name] is not None and fields[name] not in harmless:
        raise BadRequest(f"{name} is {shown(fields[name])}, which is not available: {why}")


def sampling_fields(fields: dict[str, Any], *length_names: str) -> dict[str, Any]:
    """Return the client's sampling options by the names of `Sampling`. Raises BadRequest.

    The first of `length_names` that is given sets the length.
    """
    kinds = {"temperature": float, "top_p": float, "top_k": int, "frequency_penalty": float}
    found = {name: take(fields, name, kind, None) for name, kind in kinds.items()}
    lengths = (take(fields, name, int, None) for name in length_names)
    found["max_new_tokens"] = next((length for length in lengths if length is not None), None)
    limits = {"temperature": 0, "top_p": 0, "max_new_tokens": 1}
    for name, least in limits.items():
        if found[name] is not None and found[name] < least:
            raise BadRequest(f"{name} is {found[name]}; expected at least {least}")
    return {name: value for name, value in found.items() if value is not None}


def template_options(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `chat_template_kwargs`: variables of the template, such as `enable_thinking`.

    Raises BadRequest.
    """
    options = take(fields, "chat_template_kwargs", dict, {})
    if not_of_template := sorted(options.keys() & OURS):
        raise BadRequest(f"chat_template_kwargs has {', '.join(not_of_template)}, which the proxy sets")
    return options


def sse(event: dict[str, Any] | str, name: str = "") -> bytes:
    """Return one server-sent event."""
    data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
    return f"{f'event: {name}' + chr(10) if name else ''}data: {data}\n\n".encode()
