"""Replay one step of two records, each on its own ranks, and compare the output of every layer."""

from typing import TYPE_CHECKING

from areal_debug.replay.ranks import report_of_ranks
from replayer.preconditions import check_model, check_recorded_results, step_range
from replayer.request import Request, request_text

if TYPE_CHECKING:
    from recorder import Record
    from replayer.commits.layers import Call, LayersReport


def trace_both(left: "Record", right: "Record", step: int, model: str | None) -> "LayersReport":
    """Find the first layer that differs in a step of two records.

    Ends the command if a replay fails.

    Raises:
        ReplayError, WrongModel: a record cannot be replayed up to this step.
    """
    from replayer.commits.layers import compare_calls

    return compare_calls(step, trace(left, step, model), trace(right, step, model))


def trace(record: "Record", step: int, model: str | None) -> "list[list[Call]]":
    """Return the layer calls of every rank in a step."""
    from replayer.commits.layers import Call

    step_range(record, step, step)
    check_recorded_results(record, "--layers")
    check_model(record, model or record.header.config["actor"]["path"], step)
    request = Request(record.path, step, step, model)
    report = report_of_ranks(
        ["-m", "areal_debug.replay.on_rank", "layers", request_text(request)],
        record.header.world_size,
        quiet=True,
    )
    return [[Call(**call) for call in calls] for calls in report["calls"]]
