"""Errors in the input of hangdoctor; the text of each says what to do next.

ValueError
    HangInputError        the input cannot be diagnosed: not a dump, no ranks, too large
        UnreadableDump    one file is not what it claims to be; the reader notes it and continues
"""


class HangInputError(ValueError):
    """The input as a whole is unusable; the text gives what is wrong, the value seen, what to do
    next.
    """


class UnreadableDump(HangInputError):
    """One file of many cannot be read. Callers turn it into a note of the snapshot."""
