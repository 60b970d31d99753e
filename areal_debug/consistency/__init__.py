"""`areal-debug consistency`: compare an engine's logprobs with the model's; text and page.

Its Python names are imported when they are first used.
"""

from areal_debug.installation import lazy_names

__getattr__, __all__ = lazy_names(
    {
        "areal_debug.consistency.engine_question": ["ask_with_recorded_weights"],
        "consistency.report": ["document"],
        "consistency.case": ["Request"],
        "consistency.check": ["Checked", "check"],
        "consistency.diagnose": ["Diagnosis"],
        "consistency.errors": ["ConsistencyError"],
        "consistency.entry.in_loop": ["InLoop"],
        "consistency.source": ["Sampled", "read_record"],
    },
    __name__,
)
