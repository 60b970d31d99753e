"""The lines by which a benchmark reports a comparison with a peer, for `make bench` to read."""

import json
import statistics
from collections.abc import Sequence

MARK = "@peer "


def report(what: str, beside: str, unit: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
    """Print a comparison of measurements in `unit` that were taken in pairs.

    The ratio is theirs to ours, so above 1 ours is cheaper: median, lowest, highest of the pairs.
    """
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    values = {"what": what, "beside": beside, "unit": unit}
    values |= {"ours": statistics.median(ours), "theirs": statistics.median(theirs)}
    values["ratio"] = [statistics.median(ratios), min(ratios), max(ratios)]
    print(MARK + json.dumps(values), flush=True)


def report_rate(what: str, tool: str, named: tuple[int, int], accused: tuple[int, int]) -> None:
    """Print how many of the failures a tool names, and how many of the healthy runs it accuses."""
    values = {"what": what, "tool": tool, "named": named[0], "failures": named[1]}
    print(MARK + json.dumps(values | {"accused": accused[0], "healthy": accused[1]}), flush=True)
