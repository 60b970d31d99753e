"""What recorded operations say: which rank is behind on which group, and who disagrees on an operation.

Flight Recorder numbers the collectives of each group on each rank. Ranks that stand at the same number must
agree on operation, sizes and dtype; a rank whose last number is lower has not come yet. Stacks then say where
it is instead.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from hangdoctor.model import CollectiveRecord, RasRank

# Sizes of these differ between ranks by design.
UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "allgather_v", "reduce_scatter_v", "broadcast")


@dataclass(frozen=True, slots=True)
class Finding:
    """One disagreement on one group: `odd_ranks` differ from `agreeing_ranks` in `detail`."""

    kind: Literal["behind", "operation", "size", "dtype", "same"]
    group: str
    sequence: int
    operation: str
    odd_ranks: tuple[int, ...]
    agreeing_ranks: tuple[int, ...]
    detail: str


def findings_of(records: Iterable[CollectiveRecord]) -> tuple[Finding, ...]:
    """Disagreements of all groups, the most telling first: other operation, other size, behind, all the same."""
    by_group: dict[str, dict[int, list[CollectiveRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if not record.is_p2p:
            by_group[record.group][record.rank].append(record)
    found = [f for group, ranks in by_group.items() if (f := finding_of(group, ranks))]
    order = ("operation", "dtype", "size", "behind", "same")
    return tuple(sorted(found, key=lambda f: order.index(f.kind)))


def finding_of(group: str, ranks: dict[int, list[CollectiveRecord]]) -> Finding | None:
    """The first sequence number at which the ranks of one group part, or None where they all are done."""
    last = {rank: max(r.sequence for r in entries) for rank, entries in ranks.items()}
    first = {rank: min(r.sequence for r in entries) for rank, entries in ranks.items()}
    by_sequence: dict[int, dict[int, CollectiveRecord]] = defaultdict(dict)
    for rank, entries in ranks.items():
        for record in entries:
            by_sequence[record.sequence][rank] = record
    start = max(first.values())  # rings forget: compare only what every rank still remembers
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
        return Finding("behind", group, top, operation, behind, agreeing, detail)
    if not open_ranks or len(ranks) < 2:
        return None
    current = by_sequence[top][agreeing[0]]
    detail = f"all {len(last)} ranks enqueued {current.operation} number {top}"
    return Finding("same", group, top, current.operation, (), agreeing, detail)


def disagreement(group: str, sequence: int, at: dict[int, CollectiveRecord]) -> Finding | None:
    """Ranks whose operation, dtype or size at one number differs from most."""
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
            this, other = value(at[odd[0]]), value(at[usual[0]])
            detail = f"{this} where the others have {other}"
            return Finding(kind, group, sequence, at[odd[0]].operation, odd, usual, detail)
    return None


def minority(values: dict[int, object]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks whose value is not the most frequent one, and those whose is; in a tie all are odd."""
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return (), tuple(sorted(values))
    if counts[0][1] == counts[1][1]:
        return tuple(sorted(values)), tuple(sorted(r for r, v in values.items() if v == counts[1][0]))
    odd = tuple(sorted(rank for rank, value in values.items() if value != counts[0][0]))
    return odd, tuple(sorted(set(values) - set(odd)))


def behind_by_ras(ranks: Iterable[RasRank]) -> tuple[tuple[int, ...], str]:
    """Ranks that RAS calls missing, or whose operation count is lower than another's on the same communicator."""
    by_communicator: dict[str, list[RasRank]] = defaultdict(list)
    for rank in ranks:
        by_communicator[rank.communicator].append(rank)
    for name, group in by_communicator.items():
        if dead := tuple(sorted({r.rank for r in group if r.status in ("MISSING", "DEAD", "UNRESPONSIVE")})):
            return dead, f"RAS: communicator {name} has no answer from them"
        counts = {r.rank: r.operations for r in group if r.operations is not None}
        if counts and len(set(counts.values())) > 1:
            top = max(counts.values())
            behind = tuple(sorted(rank for rank, count in counts.items() if count < top))
            return behind, f"RAS: launched {min(counts.values())} operations where the others launched {top}"
    return (), ""
