"""`areal-debug hang`: collect the stacks of a job, diagnose why it hangs, watch for hangs.

Its Python names are imported when they are first used.
"""

from areal_debug.installation import lazy_names

__getattr__, __all__ = lazy_names(
    {
        "hangdoctor.collect.discover": ["Search"],
        "hangdoctor.collect.host": ["collect_host"],
        "hangdoctor.collect.pyspy": ["Options"],
        "hangdoctor.diagnose": ["diagnose"],
        "hangdoctor.errors": ["HangInputError"],
        "hangdoctor.heartbeat": ["beat", "done"],
        "hangdoctor.model": ["Diagnosis", "Snapshot"],
        "hangdoctor.parse.read": ["read_snapshot"],
    },
    __name__,
)
