"""`areal-debug consistency`: compare an engine's logprobs with the model's; text and page.

Its Python names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from areal_debug.installation import lazy_names

if TYPE_CHECKING:
    from areal_debug.consistency.engine_question import (
        ask_with_recorded_weights as ask_with_recorded_weights,
    )
    from consistency.case import Request as Request
    from consistency.check import Checked as Checked
    from consistency.check import check as check
    from consistency.diagnose import Diagnosis as Diagnosis
    from consistency.errors import ConsistencyError as ConsistencyError
    from consistency.in_loop import InLoop as InLoop
    from consistency.report import assert_consistent as assert_consistent
    from consistency.report import document as document
    from consistency.source import Sampled as Sampled
    from consistency.source import read_record as read_record

__getattr__, __all__ = lazy_names(
    {
        "areal_debug.consistency.engine_question": ["ask_with_recorded_weights"],
        "consistency.report": ["assert_consistent", "document"],
        "consistency.case": ["Request"],
        "consistency.check": ["Checked", "check"],
        "consistency.diagnose": ["Diagnosis"],
        "consistency.errors": ["ConsistencyError"],
        "consistency.in_loop": ["InLoop"],
        "consistency.source": ["Sampled", "read_record"],
    },
    __name__,
)
