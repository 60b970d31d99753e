"""The text around the first token that differs, on both sides."""

from typing import TYPE_CHECKING

from areal_debug.record.decode import load_decoder

if TYPE_CHECKING:
    from recorder import Record
    from replayer.compare.stages import StageDifference
    from replayer.diff import Excerpt


def read_excerpts(
    left: "Record", right: "Record", step: int, difference: "StageDifference"
) -> "tuple[Excerpt, Excerpt] | None":
    """Return the text around a difference in A and in B, None if it is not at a token of both."""
    from replayer.diff import Excerpt, find_context

    context = find_context(left, right, step, difference)
    if context is None:
        return None
    decode = load_decoder(left) or (lambda ids: " ".join(map(str, ids)))

    def excerpt(ids: tuple[int, ...]) -> "Excerpt":
        parts = ids[: context.at], ids[context.at :][:1], ids[context.at + 1 :]
        return Excerpt(*(decode(list(part)) if part else "" for part in parts))

    return excerpt(context.left), excerpt(context.right)
