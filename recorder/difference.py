"""Differences between two documents, member by member."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """One member that differs; None if absent."""

    where: str
    recorded: Any
    current: Any


def find_differences(recorded: Any, current: Any) -> tuple[Difference, ...]:
    """List the differences between two JSON-like documents, sorted by path. NaNs are equal."""
    if recorded == current:
        return ()
    from deepdiff import DeepDiff  # 0.3 s to import, and most comparisons find nothing

    tree = DeepDiff(recorded, current, view="tree", ignore_nan_inequality=True, threshold_to_diff_deeper=0)
    found = [
        Difference(
            ".".join(str(part) for part in item.path(output_format="list")),
            present(item.t1),
            present(item.t2),
        )
        for kind in tree.values()
        for item in kind
    ]
    return tuple(sorted(found, key=lambda difference: difference.where))


def present(value: Any) -> Any:
    """The value, or None if deepdiff marks it as absent."""
    from deepdiff.helper import notpresent

    return None if value is notpresent else value
