"""JSON from a client, read field by field: a value of the expected kind, or a refusal that names the field and the value."""

import inspect
import json
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from areal_core.rollout.agent.errors import BadRequest

T = TypeVar("T")
REQUIRED: Any = object()
# Arguments of `apply_chat_template` that are no variables of a template.
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
    """The body as a JSON object. Raises BadRequest."""
    try:
        parsed = json.loads(body)
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise BadRequest(f"the body is {shown(parsed)}; expected a JSON object")
    return parsed


def take(fields: dict[str, Any], name: str, kind: type[T], default: Any = REQUIRED) -> Any:
    """The value of one field; the default where it is absent or null. Raises BadRequest."""
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
    """A list of objects; empty where the field is absent. Raises BadRequest."""
    items = take(fields, name, list, [])
    for item in items:
        if not isinstance(item, dict):
            raise BadRequest(f"{name} holds {shown(item)}; expected objects")
    return items


def text_of(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a message's content: itself, or its parts of these kinds together. Raises BadRequest for images and the like."""
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
                raise BadRequest(f"{where} holds {shown(part)}; only text is served")
    return "".join(texts)


def shown(value: Any) -> str:
    """A value for a message: not more of it than a line holds."""
    return repr(value)[:80]


def refuse(fields: dict[str, Any], name: str, harmless: tuple[Any, ...], why: str) -> None:
    """Raises BadRequest if a field has a value that would be ignored."""
    if name in fields and fields[name] is not None and fields[name] not in harmless:
        raise BadRequest(f"{name} is {shown(fields[name])}, which is not available: {why}")


def sampling_fields(fields: dict[str, Any], *length_names: str) -> dict[str, Any]:
    """What a client sets of the sampling, by the names of `Sampling`. The first length that is given counts. Raises BadRequest."""
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
    """`chat_template_kwargs`: what the model's template is told besides, `enable_thinking` say. Raises BadRequest."""
    options = take(fields, "chat_template_kwargs", dict, {})
    if not_of_template := sorted(options.keys() & OURS):
        raise BadRequest(f"chat_template_kwargs sets {', '.join(not_of_template)}, which the proxy decides")
    return options


def sse(event: dict[str, Any] | str, name: str = "") -> bytes:
    """One server-sent event."""
    data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
    return f"{f'event: {name}' + chr(10) if name else ''}data: {data}\n\n".encode()
