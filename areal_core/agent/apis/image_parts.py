"""Contents of messages in all APIs: texts and pictures in order, and remote pictures fetched."""

import asyncio
from dataclasses import replace
from typing import Any

from areal_core.agent.apis.json_fields import shown
from areal_core.agent.apis.request_fields import warn_once
from areal_core.agent.conversation import Call, Message, Part, RemoteImage
from areal_core.agent.errors import BadRequest
from areal_core.data.images import bytes_of_url
from areal_core.errors import ImageError


def parts_of(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> tuple[Part, ...]:
    """Return the texts and pictures of a message's content, in order.

    Args:
        where: names the content in errors.
        kinds: types of the parts that are texts.

    Raises:
        BadRequest: other content, such as sound, or no picture.
    """
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        raise BadRequest(f"{where} is {shown(content)}; expected a text or a list of parts")
    return tuple(part_of(part, where, kinds) for part in content)


def part_of(part: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> Part:
    """Return the text or picture of one part, as `parts_of`."""
    match part:
        case {"type": kind, "text": str(text)} if kind in kinds:
            return text
        case {"type": "image_url", "image_url": {"url": str(url)} as image}:
            return picture_of(url, image.get("detail"))
        case {"type": "image_url" | "input_image", "image_url": str(url)}:
            return picture_of(url, part.get("detail"))
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return picture_of(url)
        case {"type": "image", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            return picture_of(f"data:{kind};base64,{data}")
    raise BadRequest(f"{where} contains {shown(part)}; only text and images are supported")


def picture_of(url: str, detail: Any = None) -> Part:
    """Return the picture of a data: URL; one of http(s) is fetched later. Raises BadRequest."""
    if detail not in (None, "auto"):
        warn_once(f"an image has detail {shown(detail)}, which is ignored: the processor decides its size")
    if url.startswith(("http://", "https://")):
        return RemoteImage(url)
    try:
        return bytes_of_url(url)
    except ImageError as error:
        raise BadRequest(str(error)) from error


def message_of(role: str, parts: tuple[Part, ...], **fields: Any) -> Message:
    """Return a message; its content is the text of the parts. Raises BadRequest."""
    has_pictures = any(not isinstance(part, str) for part in parts)
    if has_pictures and role == "assistant":
        raise BadRequest("an assistant message contains an image; the model samples text only")
    text = "".join(part for part in parts if isinstance(part, str))
    return Message(role, text, parts=parts if has_pictures else (), **fields)


async def fetched(call: Call, allowed: bool) -> Call:
    """Return a call with the bytes of its remote pictures.

    Raises:
        BadRequest: they are not `allowed`, or one cannot be fetched.
    """
    if not any(isinstance(part, RemoteImage) for message in call.messages for part in message.parts):
        return call
    messages = []
    for message in call.messages:
        parts = []
        for part in message.parts:
            if isinstance(part, RemoteImage):
                try:
                    part = await asyncio.to_thread(bytes_of_url, part.url, allowed)
                except ImageError as error:
                    raise BadRequest(str(error)) from error
            parts.append(part)
        messages.append(replace(message, parts=tuple(parts)))
    return replace(call, messages=tuple(messages))
