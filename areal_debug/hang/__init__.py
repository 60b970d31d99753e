"""`areal-debug hang`: collect the stacks of a job, diagnose why it hangs, watch for hangs.

Its Python names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from areal_debug.installation import lazy_names

if TYPE_CHECKING:
    from hangdoctor.collect.discover import Search as Search
    from hangdoctor.collect.host import collect_host as collect_host
    from hangdoctor.collect.pyspy import Options as Options
    from hangdoctor.diagnose import diagnose as diagnose
    from hangdoctor.errors import HangInputError as HangInputError
    from hangdoctor.heartbeat import beat as beat
    from hangdoctor.heartbeat import done as done
    from hangdoctor.model import Diagnosis as Diagnosis
    from hangdoctor.model import Snapshot as Snapshot
    from hangdoctor.parse.read import read_snapshot as read_snapshot

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
