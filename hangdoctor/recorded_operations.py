"""Compare recorded operations: which rank is behind in which group, and which ranks disagree.

Flight Recorder numbers the collectives of each group on each rank. Ranks at the same number must
agree on operation, sizes and dtype; a rank whose last number is lower has not arrived yet. Stacks
then show where it is instead.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hangdoctor.model import CollectiveRecord, RasRank

RAS_SILENT = ("MISSING", "DEAD", "UNRESPONSIVE")  # states of ranks that RAS cannot reach
# Sizes of these differ between ranks by design.
UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "allgather_v", "reduce_scatter_v", "broadcast")


@dataclass(frozen=True, slots=True)
class OperationFinding:
    """One disagreement on one group: `odd_ranks` differ from `agreeing_ranks` in `detail`."""

    kind: Literal["behind", "operation", "size", "dtype", "same"]
    group: str
    sequence: int
    operation: str
    odd_ranks: tuple[int, ...]
    agreeing_ranks: tuple[int, ...]
    detail: str
    source: str = "Flight Recorder"


def findings_of(records: Iterable[CollectiveRecord]) -> tuple[OperationFinding, ...]:
    """Return the disagreements of all groups, the most specific first: operation, dtype, size,
    behind, same.
    """
    by_group: dict[str, dict[int, list[CollectiveRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if not record.is_p2p:
            by_group[record.group][record.rank].append(record)
    found = [
        replace(f, source=next(iter(ranks.values()))[0].source)
        for group, ranks in by_group.items()
        if (f := finding_of(group, ranks))
    ]
    order = ("operation", "dtype", "size", "behind", "same")
    return tuple(sorted(found, key=lambda f: order.index(f.kind)))


def finding_of(group: str, ranks: dict[int, list[CollectiveRecord]]) -> OperationFinding | None:
    """Return the first sequence number at which the ranks of one group diverge, or None where all
    are done.
    """
    last = {rank: max(r.sequence for r in entries) for rank, entries in ranks.items()}
    first = {rank: min(r.sequence for r in entries) for rank, entries in ranks.items()}
    by_sequence: dict[int, dict[int, CollectiveRecord]] = defaultdict(dict)
    for rank, entries in ranks.items():
        for record in entries:
            by_sequence[record.sequence][rank] = record
    start = max(first.values())  # ring buffers: compare only what every rank still has
    for sequence in sorted(by_sequence):
        if sequence >= start and (odd := disagreement(group, sequence, by_sequence[sequence])):
            return odd
    open_ranks = {rank for rank, entries in ranks.items() if any(r.state != "completed" for r in entries)}
    top = max(last.values())
    behind = tuple(sorted(rank for rank, number in last.items() if number < top))
    agreeing = tuple(sorted(set(last) - set(behind)))
    if behind and open_ranks:
        operation = next(r.operation for r in ranks[agreeing[0]] if r.sequence == top)
        lowest = min(last[rank] for rank in behind)
        detail = f"enqueued {lowest} of {top} collectives: {operation} number {lowest + 1} waits for them"
        return OperationFinding("behind", group, top, operation, behind, agreeing, detail)
    if not open_ranks or len(ranks) < 2:
        return None
    current = by_sequence[top][agreeing[0]]
    detail = f"all {len(last)} ranks enqueued {current.operation} number {top}"
    return OperationFinding("same", group, top, current.operation, (), agreeing, detail)


def disagreement(group: str, sequence: int, at: dict[int, CollectiveRecord]) -> OperationFinding | None:
    """Return the ranks whose operation, dtype or size at one number differs from the majority."""
    if len(at) < 2:
        return None
    any_operation = next(iter(at.values())).operation
    checks: tuple[tuple[Literal["operation", "dtype", "size"], Callable[[CollectiveRecord], object]], ...] = (
        ("operation", lambda r: r.operation),
        ("dtype", lambda r: r.input_dtypes),
        ("size", lambda r: r.input_sizes),
    )
    for kind, value in checks:
        if kind != "operation" and any_operation.lower().startswith(UNEVEN):
            continue
        odd, usual = minority({rank: value(record) for rank, record in at.items()})
        if odd:
            this, other = shown(value(at[odd[0]])), shown(value(at[usual[0]]))
            tie = set(usual) <= set(odd)
            detail = f"{this} where the others have {other}"
            if tie:
                detail = f"rank {odd[0]} has {this}, rank {usual[0]} has {other}"
            return OperationFinding(kind, group, sequence, at[odd[0]].operation, odd, usual, detail)
    return None


def shown(value: object) -> str:
    """Return an operation, or sizes and dtypes as `[2, 3]` and `Float`."""
    if not isinstance(value, tuple):
        return str(value)
    return ", ".join(str(list(one)) if isinstance(one, tuple) else str(one) for one in value)


def minority(values: dict[int, object]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks whose value is not the most frequent one, and the others; in a tie all are
    odd.
    """
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return (), tuple(sorted(values))
    if counts[0][1] == counts[1][1]:
        first = values[min(values)]
        return tuple(sorted(values)), tuple(sorted(r for r, v in values.items() if v != first))
    odd = tuple(sorted(rank for rank, value in values.items() if value != counts[0][0]))
    return odd, tuple(sorted(set(values) - set(odd)))


def behind_by_ras(ranks: Iterable[RasRank]) -> tuple[tuple[int, ...], str]:
    """Return the ranks that RAS reports missing, or whose operation count on a communicator is
    lower than another's, with the finding as text.
    """
    by_communicator: dict[str, list[RasRank]] = defaultdict(list)
    for rank in ranks:
        by_communicator[rank.communicator].append(rank)
    for name, group in by_communicator.items():
        if dead := silent_in(group):
            return dead, f"RAS: communicator {name} gets no response from them"
        launched = [(r.rank, r.operations) for r in group if r.operations is not None]
        counts = [count for _, count in launched]
        if counts and min(counts) < max(counts):
            behind = {rank for rank, count in launched if rank is not None and count < max(counts)}
            fact = f"RAS: launched {min(counts)} operations where the others launched {max(counts)}"
            return tuple(sorted(behind)), fact
    return (), ""


def silent_in(ranks: Iterable[RasRank]) -> tuple[int, ...]:
    return tuple(sorted({r.rank for r in ranks if r.rank is not None and r.status in RAS_SILENT}))
