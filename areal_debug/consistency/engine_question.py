"""Ask which engine explains that two records sampled differently, with weights made by a replay."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from consistency.entry.which_engine import EngineAnswer
    from recorder import Record

# Versions before the sampled ones that an engine may still have held.
VERSIONS_BEFORE = 3


def ask_with_recorded_weights(
    left: "Record", right: "Record", step: int, model: str | None = None
) -> "EngineAnswer":
    """Replay one record to the weights that may have sampled a step, and ask about both engines.

    The weights before the step must be equal in both records.

    Args:
        model: folder of the model that the runs started from, if it has moved.

    Raises:
        ReplayError: the record cannot be replayed up to the step.
        ConsistencyError: there is nothing to compare.
    """
    from areal_debug.consistency.replayed import replayed_weights
    from consistency.entry.which_engine import ask_engine
    from replayer.carried import model_folder
    from replayer.preconditions import check_recorded_results

    record = max(left, right, key=lambda side: max([0, *(a for a in side.anchors() if a <= step)]))
    check_recorded_results(record, "why")
    steps = [number for number in record.steps if first_step(left, right, step) <= number <= step]
    with replayed_weights(record, steps, model) as models:
        if record.header.config["actor"]["use_lora"]:
            models["base"] = Path(model_folder(record, model))
        return ask_engine(left, right, step, models)


def first_step(left: "Record", right: "Record", step: int) -> int:
    """Return the first step whose weights may have sampled, before those of the oldest token."""
    oldest = min(
        int(versions[versions >= 0].min(initial=step))
        for record in (left, right)
        for rank in range(record.header.num_ranks)
        for versions in [record.step(step).batch(rank, ("versions",))["versions"]]
    )
    return max(0, oldest - VERSIONS_BEFORE)
