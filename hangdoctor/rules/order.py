"""The order in which the rules are applied: what explains more comes first, `unknown` last."""

import difflib
import inspect
from types import ModuleType

from hangdoctor.errors import HangInputError
from hangdoctor.rules import (
    checkpoint_stall,
    cleanup_deadlock,
    collective_mismatch,
    dataloader_stall,
    external_wait,
    init_deadlock,
    lock_deadlock,
    missing_rank,
    nccl_timeout,
    p2p_shape_mismatch,
    partial_exception,
    straggler_or_not_hung,
    unknown,
    weight_sync_deadlock,
)

RULES: tuple[ModuleType, ...] = (
    straggler_or_not_hung,
    missing_rank,
    weight_sync_deadlock,
    init_deadlock,
    cleanup_deadlock,
    lock_deadlock,
    dataloader_stall,
    partial_exception,
    checkpoint_stall,
    external_wait,
    p2p_shape_mismatch,
    collective_mismatch,
    nccl_timeout,
    unknown,
)


def labels() -> tuple[str, ...]:
    """Return every label, in the order in which the rules are applied."""
    return tuple(rule.__name__.rsplit(".", 1)[-1] for rule in RULES)


def explain(label: str | None) -> str:
    """Return the explanation of one label, or one line for each.

    Raises `HangInputError` for a label that does not exist.
    """
    texts = {rule.__name__.rsplit(".", 1)[-1]: inspect.getdoc(rule) or "" for rule in RULES}
    if label is None:
        width = max(map(len, texts))
        return "\n".join(f"{name:{width}}  {text.splitlines()[0]}" for name, text in texts.items())
    if label not in texts:
        close = difflib.get_close_matches(label, texts, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise HangInputError(f"No label is called {label!r}.{hint} The labels: {', '.join(texts)}.")
    return f"{label}\n\n{texts[label]}"
