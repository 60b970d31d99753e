"""The job moves, or one rank is merely slow.

What it looks like: between two samples the ranks that wait in a collective have gone through it, or the one rank that the
others wait for computes, compiles or loads: its stack changes, its process uses CPU.

Common causes: the first step traces, compiles or autotunes kernels; uneven work (longest sequence, most experts' tokens, rank 0
evaluating or decoding samples); a throttled or shared GPU; a loop that is long but ends.

How to tell it from a hang: take two samples more than a step apart. A hang is where nobody moves.
"""

from hangdoctor.case import Case, Standing
from hangdoctor.graph import Graph
from hangdoctor.rules.verdict import (
    Verdict,
    named,
    place,
    plural,
    ranks_of,
    stack_evidence,
    step,
    stillness,
    waiting_evidence,
    waiting_for,
)

# What a job does once, at its start: with one sample it is more likely slow than stuck.
ONCE = ("compile", "load", "running")
WORKING = (
    "running",
    "blocked",
    "compile",
    "import",
    "load",
    "data",
    "backward",
    "device",
    "file",
    "checkpoint",
)


def judge(case: Case, graph: Graph) -> Verdict | None:
    if case.lost or not case.ranks:
        return None
    if moving := job_moves(case, graph):
        return moving
    sources = graph.source_ranks
    if sources and all(works(s) for s in sources):
        return slow(case, graph, sources)
    if sources and all(asks_for_requests(s) for s in case.ranks):
        return idle_engine(case, graph)
    if sources and case.num_samples < 2 and all(s.stance.kind in ONCE for s in sources):
        return slow(case, graph, sources)
    return None


def asks_for_requests(standing: Standing) -> bool:
    """Whether an engine's scheduler stands where it takes requests from its queue, or passes them to its other ranks."""
    asking = {"recv_requests", "_process_input_queue", "recv_from_tokenizer"}
    return "engine" in standing.stance.phases and any(f.function in asking for f in standing.stance.frames)


def idle_engine(case: Case, graph: Graph) -> Verdict:
    """An inference engine without requests: one rank polls its socket, the others wait for what it will broadcast."""
    return Verdict(
        "straggler_or_not_hung",
        "low",
        (),
        f"All {len(case.ranks)} engine ranks stand in their scheduler's loop: an engine without requests looks like this.",
        stack_evidence(graph.source_ranks[:3], "polls for requests")
        + waiting_evidence(graph)
        + stillness(case),
        (
            step(
                "curl -m 5 http://SERVER/health_generate",
                "a request that is answered proves that it is alive",
            ),
        ),
        ("Requests that were sent and are not answered.",),
    )


def job_moves(case: Case, graph: Graph) -> Verdict | None:
    """Ranks that were waiting for others have gone on: nobody holds them."""
    waiters = graph.waiting_ranks
    moved = [s for s in case.ranks if s.moved]
    gone_on = [s for s in waiters if s.moved]
    stuck_alone = [s for s in graph.source_ranks if not s.moved and not s.works]
    if not moved or (waiters and not gone_on) or (stuck_alone and len(gone_on) * 2 < len(waiters) + 1):
        return None
    return Verdict(
        "straggler_or_not_hung",
        "high" if len(moved) == len(case.ranks) else "medium",
        (),
        f"The job moves: {len(moved)} of {len(case.ranks)} ranks stood elsewhere in the next sample.",
        stillness(case) + stack_evidence(moved[:3], "moved between the samples"),
        (
            step(
                "areal-debug hang collect --to LATER",
                "compare again a few steps later, if it is slower than it should be",
            ),
        ),
        ("Samples a minute apart that show every rank at the same place.",),
    )


def works(standing: Standing) -> bool:
    """Whether a rank that others wait for does something: it computes, or its stack changes while it works."""
    stance = standing.stance
    if stance.phases & {"error", "cleanup"} or stance.kind not in WORKING:
        return False
    return standing.works or bool(standing.moved and stance.kind in ("running", "compile", "import", "load"))


def slow(case: Case, graph: Graph, sources: tuple[Standing, ...]) -> Verdict:
    everybody = len(sources) == len(case.ranks)
    culprits = () if everybody else ranks_of(sources)
    what = {s.stance.kind for s in sources}
    doing = "compiling" if what == {"compile"} else "loading" if what <= {"import", "load"} else "working"
    summary = (
        f"Nobody waits for anybody: all ranks are {doing}."
        if everybody
        else f"{named(sources).capitalize()} {plural(sources, 'is', 'are')} still {doing} at {place(sources[0])}; {waiting_for(graph)}."
    )
    return Verdict(
        "straggler_or_not_hung",
        "low" if case.num_samples < 2 or (len(sources) * 2 > len(case.ranks) and not everybody) else "medium",
        culprits,
        summary,
        stack_evidence(sources, f"is {doing}", graph) + waiting_evidence(graph),
        (
            step("areal-debug hang collect --to LATER", "see whether it gets anywhere in a few minutes"),
            step(
                "py-spy record --pid PID --duration 30",
                "a profile of the slow rank says what it computes",
                "30 s, 1 % CPU",
            ),
        ),
        ("The same line of the same rank in samples minutes apart: then it loops or is stuck there.",),
    )
