"""The order in which the rules are applied: what explains more comes first, `unknown` last."""

import difflib

from hangdoctor.errors import HangInputError
from hangdoctor.rules.ended import absent_at_the_end, failed_in_wait, threads_still
from hangdoctor.rules.nccl import nccl_timeout
from hangdoctor.rules.one_rank import (
    checkpoint_stall,
    dataloader_stall,
    external_wait,
    lock_deadlock,
    partial_exception,
)
from hangdoctor.rules.progress import straggler_or_not_hung, unknown
from hangdoctor.rules.start_and_end import cleanup_deadlock, init_deadlock, missing_rank
from hangdoctor.rules.together import collective_mismatch, p2p_shape_mismatch
from hangdoctor.rules.verdict import LABELS
from hangdoctor.rules.weight_sync import weight_sync_deadlock

RULES = (
    straggler_or_not_hung,
    missing_rank,
    absent_at_the_end,
    weight_sync_deadlock,
    init_deadlock,
    cleanup_deadlock,
    failed_in_wait,
    lock_deadlock,
    dataloader_stall,
    partial_exception,
    checkpoint_stall,
    external_wait,
    p2p_shape_mismatch,
    collective_mismatch,
    nccl_timeout,
    threads_still,
    unknown,
)


def labels() -> tuple[str, ...]:
    """Return every label, in the order in which the rules are applied."""
    return tuple(LABELS)


def explain(label: str | None) -> str:
    """Return the explanation of one label, or one line for each.

    Raises `HangInputError` for a label that does not exist.
    """
    if label is None:
        width = max(map(len, LABELS))
        return "\n".join(f"{name:{width}}  {row['about'].splitlines()[0]}" for name, row in LABELS.items())
    if label not in LABELS:
        close = difflib.get_close_matches(label, LABELS, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise HangInputError(f"No label is called {label!r}.{hint} The labels: {', '.join(LABELS)}.")
    return f"{label}\n\n{LABELS[label]['about']}"
