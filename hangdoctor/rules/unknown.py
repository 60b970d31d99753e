"""The evidence is inconclusive.

What it looks like: the stack of one rank out of many, stacks that end in the program's own code
without a known wait, or ranks that could not be read. "Inconclusive" and a list of what to collect
is worth more than a guess.
"""

from hangdoctor.case import Case
from hangdoctor.graph import Graph
from hangdoctor.groups import rank_ranges
from hangdoctor.model import Evidence
from hangdoctor.recorded_operations import behind_by_ras
from hangdoctor.rules.verdict import (
    Verdict,
    begin,
    name_ranks,
    place,
    plural,
    ranks_of,
    stack_evidence,
    step,
    stillness,
    waiting_evidence,
    waiting_for,
)


def judge(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict of last resort: what is known, with low confidence."""
    sources = graph.source_ranks
    few = len(sources) * 2 <= len(case.ranks)
    if sources and graph.waiting:
        summary = (
            f"{begin(name_ranks(sources))} {plural(sources, 'is', 'are')} at {place(sources[0])}, "
            f"outside the operation of the others ({waiting_for(graph)}), but the stack does not show why."
        )
    elif len(case.ranks) == 1:
        only = case.ranks[0]
        summary = f"Only {name_ranks([only])} was read: it is at {place(only)}; the other ranks are needed for a diagnosis."
    elif not case.ranks:
        return from_records_alone(case)
    else:
        summary = f"{len(case.ranks)} ranks were read; their stacks do not show what they wait for."
    return Verdict(
        "unknown",
        "low",
        ranks_of(sources) if few and graph.waiting else (),
        summary,
        stack_evidence(sources, "is here", graph) + waiting_evidence(graph) + stillness(case),
        (
            step(
                "areal-debug hang collect --to FOLDER",
                "all ranks, three samples, native frames and /proc facts",
            ),
        ),
        ("Any of the missing evidence listed under `collect`.",),
    )


def from_records_alone(case: Case) -> Verdict:
    """Return the verdict without stacks: records show which rank is behind, not where it is."""
    behind = next((f for f in case.findings if f.kind == "behind"), None)
    odd, fact = (behind.odd_ranks, behind.detail) if behind else behind_by_ras(case.snapshot.ras)
    who = f"{'Rank' if len(odd) == 1 else 'Ranks'} {rank_ranges(odd)}"
    return Verdict(
        "unknown",
        "low",
        odd,
        f"{who} {'is' if len(odd) == 1 else 'are'} behind ({fact}); without stacks the cause is unknown."
        if odd
        else "No rank's stack was read.",
        (Evidence(rank_ranges(odd), fact),) if odd else (),
        (
            step(
                "areal-debug hang collect --to FOLDER",
                "the stack of the rank that is behind shows where it is instead",
            ),
        ),
        ("Records that were taken at different times.",),
    )


def to_collect(case: Case) -> tuple[str, ...]:
    """Return the evidence that would be conclusive and is not there."""
    wanted = []
    absent = rank_ranges(case.not_collected)
    if len(case.ranks) < 2 or case.missing:
        who = f"ranks {absent}" if absent else "all other ranks"
        wanted.append(f"the stacks of {who}: areal-debug hang collect --to FOLDER")
    if case.num_samples < 2:
        wanted.append("a second sample some seconds later: it distinguishes slow from stuck")
    if not any(frame.native for s in case.ranks for frame in s.thread_wait.frames[:3]):
        wanted.append(
            "native frames (py-spy dump --native): they show locks, sleeps and waits that Python frames hide"
        )
    if not case.snapshot.records:
        wanted.append(
            "Flight Recorder dumps (TORCH_FR_BUFFER_SIZE=2000): they number the collectives of each group"
        )
    if not case.snapshot.logs:
        wanted.append("the last lines of each rank's log")
    return tuple(wanted)
