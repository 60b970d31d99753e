"""What can be wrong with the input of hangdoctor, as exceptions whose text says what to do next.

ValueError
    HangInputError        nothing can be said of this input: not a dump, no ranks, too large
        UnreadableDump    one file cannot be read as what it claims to be; the reader goes on and notes it
"""


class HangInputError(ValueError):
    """The input as a whole is no use: what is wrong, the value seen, what to do next."""


class UnreadableDump(HangInputError):
    """One file of many cannot be read. Callers turn it into a note of the snapshot."""
