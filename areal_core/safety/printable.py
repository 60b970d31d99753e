"""Text from outside, made safe to print.

A terminal would obey escape sequences in a text that comes from a record, a stack or a log line, a
right-to-left mark would reorder the displayed text, and characters without a glyph hide text. What
is not printable is shown as its code, spelled as in Python: `\\x1b`, `\\u202e`, `\\U000e0041`.
"""

import logging
import re

# All but tab and newline of: C0, DEL and C1; soft hyphen, joiners, fillers and vowel separators
# without a glyph; variation selectors and tag characters, which can hide a text of any length;
# marks and overrides of direction; line and paragraph separators; surrogates; invisible operators;
# annotation and musical controls; noncharacters.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ufdd0-\ufdef\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff\ud800-\udfff"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
MAX_TEXT = 2000


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """Return `text` on one line, at most `limit` characters of it, with control codes escaped."""
    cut = text[:limit] + ("..." if len(text) > limit else "")
    return printable_block(cut.replace("\t", " ").replace("\n", " "))


def printable_block(text: str) -> str:
    """Return `text` with its lines and tabs, all other control codes escaped; of any length."""
    return UNPRINTABLE.sub(code_of, text)


class PrintableFormatter(logging.Formatter):
    """A format of log lines that shows control codes of what servers, files and models said."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_block(super().format(record))


def code_of(match: re.Match[str]) -> str:
    """Spell a character as an escape of Python: two, four or eight hexadecimal digits."""
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
