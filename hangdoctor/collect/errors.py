"""Errors that prevent a collection; the text of each says what to do next.

HangInputError
    NoRanksFound      no process looks like a rank: the text gives what was searched for
    SeveralJobs       more than one job was found: the text lists them with their pids
    PySpyMissing      there is no py-spy to dump with
    HostsUnknown      the scheduler, cluster or selector returned no host to collect from
"""

from hangdoctor.errors import HangInputError


class NoRanksFound(HangInputError):
    """No process in the searched scope looks like a rank."""


class SeveralJobs(HangInputError):
    """The search found ranks of more than one job; the caller must choose one."""


class PySpyMissing(HangInputError):
    """py-spy is neither next to this Python nor on PATH."""


class HostsUnknown(HangInputError):
    """A collection of many hosts has no host to start with."""
