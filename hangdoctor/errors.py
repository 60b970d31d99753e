"""Errors in the input of hangdoctor and errors that prevent a collection; the text of each says
what to do next.

ValueError
    HangInputError        the input cannot be diagnosed: not a dump, no ranks, too large
        UnreadableDump    one file is not what it claims to be; the reader notes it and continues
        NoRanksFound      no process looks like a rank: the text gives what was searched for
        SeveralJobs       more than one job was found: the text lists them with their pids
        PySpyMissing      there is no py-spy to dump with
        HostsUnknown      the scheduler, cluster or selector returned no host to collect from
"""


class HangInputError(ValueError):
    """The input as a whole is unusable; the text gives what is wrong, the value seen, what to do
    next.
    """


class UnreadableDump(HangInputError):
    """One file of many cannot be read. Callers turn it into a note of the snapshot."""


class NoRanksFound(HangInputError):
    """No process in the searched scope looks like a rank."""


class SeveralJobs(HangInputError):
    """The search found ranks of more than one job; the caller must choose one."""


class PySpyMissing(HangInputError):
    """py-spy is neither next to this Python nor on PATH."""


class HostsUnknown(HangInputError):
    """A collection of many hosts has no host to start with."""
