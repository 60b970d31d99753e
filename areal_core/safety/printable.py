"""Text from outside, made safe to print.

A terminal would obey escape sequences in a text that comes from a record, a stack or a log line,
and a right-to-left mark would reorder the displayed text. What is not printable is shown as its
code.
"""

import re

UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
MAX_TEXT = 2000


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """Return `text` on one line, at most `limit` characters of it, with control codes escaped."""
    cut = text[:limit] + ("..." if len(text) > limit else "")
    return UNPRINTABLE.sub(lambda match: f"\\x{ord(match[0]):02x}", cut.replace("\t", " ").replace("\n", " "))
