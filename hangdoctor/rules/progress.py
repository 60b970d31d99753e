"""Rules for jobs that move or work, and the one of last resort."""

import re
from dataclasses import replace

from hangdoctor.case import Case, Process, import_cycle, starts
from hangdoctor.graph import Graph, rank_ranges
from hangdoctor.model import Evidence
from hangdoctor.parse.logs import first_match
from hangdoctor.recorded_operations import behind_by_ras
from hangdoctor.rules.verdict import (
    Verdict,
    begin,
    behind_by_steps,
    make_verdict,
    name_ranks,
    place,
    plural,
    stack_evidence,
    stillness,
    waiting_evidence,
    waiting_for,
)
from hangdoctor.tables import ENGINE_LOOP, message

# Work that a job does once, at its start: with one sample it is more likely slow than stuck.
ONCE = ("compile", "load", "running")
STARTING = ("import", "load")
# C code that computes shows no frame of its own, and the dump may call its thread idle.
COMPUTING = message("progress", "computing")
WATCHDOG_STUCK = message("progress", "watchdog_stuck")
OF_SAMPLES = ("data", "queue", "future", "event", "rpc", "http")
# Calls of an engine that end when its workers have answered.
ASKS = re.compile(r"get_response|_?wait_for_response|collective_rpc|execute_model")
WORKING = (
    "running", "blocked", "compile", "import", "load", "data", "backward", "device", "file", "checkpoint",
)  # fmt: skip


def straggler_or_not_hung(case: Case, graph: Graph) -> Verdict | None:
    """Look for ranks that made progress between the samples, or that work. A dead job does not."""
    if case.lost or not case.ranks or case.snapshot.endings:
        return None
    if moving := job_moves(case, graph):
        return moving
    sources = graph.source_ranks
    if not sources:
        return None
    engines = tuple(s for s in case.others if s.role == "engine" and s.wait.kind == "running")
    if engines and not graph.waiting and all(s.wait.kind in OF_SAMPLES for s in sources):
        # the trainer waits for what they generate: as likely as that its data are gone
        return replace(slow(case, graph, engines), confidence="medium")
    if all(works(s) for s in sources):
        return slow(case, graph, sources)
    if all(waits_for_requests(s) for s in case.ranks) and not asking(case):
        # One rank polls its socket, the others wait for its broadcast.
        return make_verdict(
            "straggler_or_not_hung",
            "low",
            (),
            f"All {len(case.ranks)} engine ranks are in their scheduler's loop, as in an engine without requests.",
            stack_evidence(sources[:3], "polls for requests") + waiting_evidence(graph) + stillness(case),
            "idle_engine",
        )
    if case.num_samples < 2 and all(s.wait.kind in STARTING and not import_cycle(s) for s in case.ranks):
        return slow(case, graph, sources)
    unseen = case.num_samples < 2 or all(s.ran is None and s.cpu_fraction is None for s in sources)
    most = len(sources) * 2 > len(case.ranks) > len(sources)
    # Most ranks in plain code while a few wait is no picture of a few slow ones.
    inverted = most and any(s.wait.kind == "running" for s in sources)
    if unseen and all(computes(s) for s in sources) and not inverted:
        return slow(case, graph, sources)
    return None


def computes(process: Process) -> bool:
    wait = process.wait
    named = wait.kind == "blocked" and wait.frame is not None and COMPUTING.search(wait.frame.function)
    return wait.kind in ONCE or (bool(named) and not wait.phases & {"cleanup", "error"})


def waits_for_requests(process: Process) -> bool:
    """True if an engine's scheduler waits for requests from its queue, or passes them to its other
    ranks.
    """
    receivers = {"recv_requests", "_process_input_queue", "recv_from_tokenizer"}
    receives = any(f.function in receivers for f in process.wait.frames)
    return receives or ("engine" in process.wait.phases and process.wait.operation == ENGINE_LOOP)


def asking(case: Case) -> list[Process]:
    """Return the processes that wait for the reply of an engine's workers to a step."""
    return [s for s in case.others if any(ASKS.fullmatch(f.function) for f in s.wait.frames)]


def job_moves(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict for waiting ranks that made progress between the samples, or None."""
    waiters = graph.waiting_ranks
    moved = [s for s in case.ranks if s.moved]
    advanced = [s for s in waiters if s.moved]
    stuck_alone = [s for s in graph.source_ranks if not s.moved and not s.works]
    if not moved or (waiters and not advanced) or (stuck_alone and len(advanced) * 2 < len(waiters) + 1):
        return None
    return make_verdict(
        "straggler_or_not_hung",
        # Texts that somebody has pasted have no times: they may be of two processes.
        "high" if len(moved) == len(case.ranks) and case.span_s else "medium",
        (),
        f"The job moves: {len(moved)} of {len(case.ranks)} ranks were elsewhere in the next sample.",
        stillness(case) + stack_evidence(moved[:3], "moved between the samples"),
        "moving",
    )


def works(process: Process) -> bool:
    """True if a rank that others wait for makes progress: it computes, or its stack changes while
    it works.
    """
    wait = process.wait
    if wait.phases & {"error", "cleanup"} or wait.kind not in WORKING:
        return False
    return process.works or bool(process.moved and wait.kind in ("running", "compile", "import", "load"))


def slow(case: Case, graph: Graph, sources: tuple[Process, ...]) -> Verdict:
    """Return the verdict for ranks that compute, compile or load while the others wait."""
    everybody = len(sources) == len(case.ranks) and sources[0] in case.ranks  # not an engine
    what = {s.wait.kind for s in sources}
    doing = "compiling" if what == {"compile"} else "loading" if what <= set(STARTING) else "working"
    unsure = case.num_samples < 2 or (len(sources) * 2 > len(case.ranks) and not everybody)
    starting = what <= set(STARTING) and all(map(starts, (s.wait for s in case.ranks)))
    where = f"at {place(sources[0])}"
    if starting:
        loads = f"{plural(sources, 'imports', 'import')} or {plural(sources, 'loads', 'load')}"
        again = "Take the stacks again in 30 s (areal-debug hang): a start that stands still hangs."
        summary = f"The job is starting: {name_ranks(sources)} {loads} {where}. {again}"
    elif everybody and len(sources) == 1 and not case.snapshot.expected:
        unread = "whether another waits for it is not known"
        summary = f"Only {name_ranks(sources)}{' of the trainer' * bool(case.others)} was read: it is {doing} {where}; {unread}."
    elif everybody:
        summary = f"No rank waits for another: all ranks are {doing}."
    else:
        who = f"{begin(name_ranks(sources))} {plural(sources, 'is', 'are')} still {doing}"
        summary = f"{who} {where}; {waiting_for(graph)}."
    return make_verdict(
        "straggler_or_not_hung",
        "low" if unsure else "medium",
        () if everybody else sources,
        summary,
        stack_evidence(sources, f"is {doing}", graph) + waiting_evidence(graph),
        kind="starting" if starting else "",
    )


def unknown(case: Case, graph: Graph) -> Verdict:
    """Return the verdict of last resort: what is known, with low confidence."""
    sources, ranks = graph.source_ranks, case.ranks
    if not ranks:
        return from_records_alone(case)
    if sources and graph.waiting:
        summary = (
            f"{begin(name_ranks(sources))} {plural(sources, 'is', 'are')} at {place(sources[0])}, "
            f"outside the operation of the others ({waiting_for(graph)}), but the stack does not show why."
        )
    elif len(ranks) == 1:
        where = f"it is at {place(ranks[0])}; the other ranks are needed for a diagnosis."
        summary = f"Only {name_ranks(ranks)}{' of the trainer' * bool(case.others)} was read: {where}"
    else:
        summary = f"{len(ranks)} ranks were read; their stacks do not show what they wait for."
    few = len(sources) * 2 <= len(ranks)
    return make_verdict(
        "unknown",
        "low",
        sources if few and graph.waiting else (),
        summary,
        stack_evidence(sources, "is here", graph) + waiting_evidence(graph) + stillness(case),
    )


def from_records_alone(case: Case) -> Verdict:
    """Return the verdict without stacks: records show which rank is behind, not where it is."""
    behind = next((f for f in case.findings if f.kind == "behind"), None)
    odd, fact = (behind.odd_ranks, behind.detail) if behind else behind_by_ras(case.snapshot.ras)
    evidence = (Evidence(rank_ranges(odd), fact),) if odd else ()
    if not odd:
        odd, fact = behind_by_steps(case)
    who = f"{plural(odd, 'Rank', 'Ranks')} {rank_ranges(odd)} {plural(odd, 'is', 'are')}"
    summary = f"{who} behind ({fact}); without stacks the cause is unknown."
    if not odd:
        found = first_match(case.snapshot.logs, WATCHDOG_STUCK)
        summary = "No rank's stack was read." + (f" A log: {found[1].string.strip()[:200]}" if found else "")
    return make_verdict("unknown", "low", odd, summary, evidence, "records")


def to_collect(case: Case) -> tuple[str, ...]:
    """Return the evidence that would be conclusive and is not there."""
    absent = rank_ranges(case.not_collected)
    who = f"ranks {absent}" if absent else "all other ranks"
    native = any(frame.native for s in case.ranks for frame in s.wait.frames[:3])
    wanted = {
        f"the stacks of {who}: areal-debug hang collect --to FOLDER": len(case.ranks) < 2 or case.missing,
        "a second sample 10 s later, as hang collect takes: it shows slow or stuck": case.num_samples < 2,
        "native frames (py-spy dump --native): they show locks, sleeps and waits that Python frames hide": not native,
        "Flight Recorder dumps (TORCH_FR_BUFFER_SIZE=2000): they number the collectives of each group": (
            not case.snapshot.records
        ),
        "the last lines of each rank's log": not case.snapshot.logs,
    }
    return tuple(text for text, is_wanted in wanted.items() if is_wanted)
