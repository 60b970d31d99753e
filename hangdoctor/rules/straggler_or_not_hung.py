"""The job makes progress, or one rank is merely slow.

What it looks like: between two samples the ranks that wait in a collective have completed it, or
the one rank that the others wait for computes, compiles or loads: its stack changes, its process
uses CPU.

Common causes: the first step traces, compiles or autotunes kernels; uneven work (longest sequence,
most experts' tokens, rank 0 evaluating or decoding samples); a throttled or shared GPU; a loop that
is long but ends.

How to distinguish it from a hang: take two samples more than a step apart. In a hang no rank moves.
"""

import re

from hangdoctor.case import Case, ProcessState
from hangdoctor.graph import Graph
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
from hangdoctor.tables import ENGINE_LOOP

# Work that a job does once, at its start: with one sample it is more likely slow than stuck.
ONCE = ("compile", "load", "running")
# C code that computes shows no frame of its own, and the dump may call its thread idle.
COMPUTING = re.compile(
    r"encode|decode|tokeni[sz]e|preprocess|parse|loads?$|dumps?$|deepcopy|shuffle|sort|hash|score|_read_video|"
    r"resize|matmul|linear|einsum|conv\d|build_index|pad|collate",
    re.I,
)
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
    """Return the verdict if the pattern is present, else None."""
    if case.lost or not case.ranks:
        return None
    if moving := job_moves(case, graph):
        return moving
    sources = graph.source_ranks
    if sources and all(works(s) for s in sources):
        return slow(case, graph, sources)
    if sources and all(waits_for_requests(s) for s in case.ranks):
        return idle_engine(case, graph)
    unseen = case.num_samples < 2 or all(s.ran is None and s.cpu_fraction is None for s in sources)
    if sources and unseen and all(computes(s) for s in sources):
        most = len(sources) * 2 > len(case.ranks) > len(sources)
        # Most ranks in plain code while a few wait is no picture of a few slow ones.
        return (
            None
            if most and any(s.thread_wait.kind == "running" for s in sources)
            else slow(case, graph, sources)
        )
    return None


def computes(process_state: ProcessState) -> bool:
    wait = process_state.thread_wait
    named = wait.kind == "blocked" and wait.frame is not None and COMPUTING.search(wait.frame.function)
    return wait.kind in ONCE or (bool(named) and not wait.phases & {"cleanup", "error"})


def waits_for_requests(process_state: ProcessState) -> bool:
    """True if an engine's scheduler waits for requests from its queue, or passes them to its other
    ranks.
    """
    receivers = {"recv_requests", "_process_input_queue", "recv_from_tokenizer"}
    wait = process_state.thread_wait
    receives = any(f.function in receivers for f in wait.frames)
    return "engine" in wait.phases and (receives or wait.operation == ENGINE_LOOP)


def idle_engine(case: Case, graph: Graph) -> Verdict:
    """Return the verdict for an inference engine without requests: one rank polls its socket, the
    others wait for its broadcast.
    """
    return Verdict(
        "straggler_or_not_hung",
        "low",
        (),
        f"All {len(case.ranks)} engine ranks are in their scheduler's loop, as in an engine without requests.",
        stack_evidence(graph.source_ranks[:3], "polls for requests")
        + waiting_evidence(graph)
        + stillness(case),
        (
            step(
                "curl -m 5 http://SERVER/health_generate",
                "a response proves that it is alive",
            ),
        ),
        ("Requests that were sent and got no response.",),
    )


def job_moves(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict for waiting ranks that made progress between the samples, or None."""
    waiters = graph.waiting_ranks
    moved = [s for s in case.ranks if s.moved]
    advanced = [s for s in waiters if s.moved]
    stuck_alone = [s for s in graph.source_ranks if not s.moved and not s.works]
    if not moved or (waiters and not advanced) or (stuck_alone and len(advanced) * 2 < len(waiters) + 1):
        return None
    return Verdict(
        "straggler_or_not_hung",
        "high" if len(moved) == len(case.ranks) else "medium",
        (),
        f"The job moves: {len(moved)} of {len(case.ranks)} ranks were elsewhere in the next sample.",
        stillness(case) + stack_evidence(moved[:3], "moved between the samples"),
        (
            step(
                "areal-debug hang collect --to LATER",
                "compare again a few steps later, if it is slower than expected",
            ),
        ),
        ("Samples a minute apart that show every rank at the same place.",),
    )


def works(process_state: ProcessState) -> bool:
    """True if a rank that others wait for makes progress: it computes, or its stack changes while
    it works.
    """
    thread_wait = process_state.thread_wait
    if thread_wait.phases & {"error", "cleanup"} or thread_wait.kind not in WORKING:
        return False
    return process_state.works or bool(
        process_state.moved and thread_wait.kind in ("running", "compile", "import", "load")
    )


def slow(case: Case, graph: Graph, sources: tuple[ProcessState, ...]) -> Verdict:
    """Return the verdict for ranks that compute, compile or load while the others wait."""
    everybody = len(sources) == len(case.ranks)
    culprits = () if everybody else ranks_of(sources)
    what = {s.thread_wait.kind for s in sources}
    doing = "compiling" if what == {"compile"} else "loading" if what <= {"import", "load"} else "working"
    summary = (
        f"No rank waits for another: all ranks are {doing}."
        if everybody
        else f"{begin(name_ranks(sources))} {plural(sources, 'is', 'are')} still {doing} "
        f"at {place(sources[0])}; {waiting_for(graph)}."
    )
    return Verdict(
        "straggler_or_not_hung",
        "low" if case.num_samples < 2 or (len(sources) * 2 > len(case.ranks) and not everybody) else "medium",
        culprits,
        summary,
        stack_evidence(sources, f"is {doing}", graph) + waiting_evidence(graph),
        (
            step("areal-debug hang collect --to LATER", "check for progress after a few minutes"),
            step(
                "py-spy record --pid PID --duration 30",
                "profiles what the slow rank computes",
                "30 s, 1 % CPU",
            ),
        ),
        ("The same line of the same rank in samples minutes apart: then it loops or is stuck there.",),
    )
