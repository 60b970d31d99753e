"""Which tool of an agent returned something else to the same call in two recordings."""

from itertools import zip_longest

from recorder.agents.conversations import Conversation, Part

AROUND = 40  # characters on each side of the first one that differs


def differing_result(left: Conversation | None, right: Conversation | None) -> tuple[str, str] | None:
    """Return what each side got from a tool, if that is the first difference of two conversations.

    None if they are equal, or the model or the agent did something else before.
    """
    if left is None or right is None:
        return None
    for one, other in zip_longest(parts_of(left), parts_of(right)):
        if one == other:
            continue
        if one is None or other is None or not one.kind == other.kind == "result" or one.name != other.name:
            return None
        first = next(
            (at for at, (a, b) in enumerate(zip(one.text, other.text, strict=False)) if a != b),
            min(len(one.text), len(other.text)),
        )
        return returned(one, first), returned(other, first)
    return None


def returned(result: Part, at: int) -> str:
    """Return what a tool returned to which call, around a character of it."""
    begin, end = max(0, at - AROUND), at + AROUND
    text = ("..." if begin else "") + result.text[begin:end] + ("..." if end < len(result.text) else "")
    return f"{result.name}({result.arguments}) returned {text!r}"


def parts_of(conversation: Conversation) -> list[Part]:
    """Return all parts of a conversation, in order, without reasoning, which templates drop."""
    parts = [part for call in conversation.calls for part in conversation.parts(call)]
    return [part for part in parts if part.kind != "reasoning"]
