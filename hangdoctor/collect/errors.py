"""Why a collection could not begin, as exceptions whose text says what to do next.

HangInputError
    NoRanksFound      no process looked like a rank: says what was looked for
    SeveralJobs       more than one job was found: lists them with their pids
    PySpyMissing      there is no py-spy to dump with
    HostsUnknown      the scheduler, cluster or selector named no host to collect from
"""

from hangdoctor.errors import HangInputError


class NoRanksFound(HangInputError):
    """No process in the place that was searched looks like a rank."""


class SeveralJobs(HangInputError):
    """The search met ranks of more than one job; the caller must choose one."""


class PySpyMissing(HangInputError):
    """py-spy is neither beside this Python nor on PATH."""


class HostsUnknown(HangInputError):
    """A many-host collection has no host to begin with."""
