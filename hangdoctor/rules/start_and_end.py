"""Rules for ranks that have not arrived, are leaving, or are gone."""

from itertools import takewhile

from hangdoctor.case import Case, Process
from hangdoctor.frames import is_library, show
from hangdoctor.graph import Graph, rank_ranges
from hangdoctor.model import Confidence, Evidence, Rank
from hangdoctor.parse.logs import only_absent, watchdog_timeouts
from hangdoctor.rules.verdict import (
    LEVELS,
    Verdict,
    begin,
    confidence,
    make_verdict,
    name_ranks,
    operation,
    place,
    plural,
    ranks_text,
    stack_evidence,
    steps_of,
    stillness,
    wait_in,
    waiters_move,
    waiting_evidence,
    waiting_for,
)
from hangdoctor.tables import LAST_CALLS, MESSAGES, MODULE_ENTRIES, message, messages
from hangdoctor.waits import context

STORE_BARRIER = messages("start_and_end", "store_barrier")
DIED = message("start_and_end", "died")
STORE_COMPLETE = message("start_and_end", "store_complete")
STATUS_TEXTS: dict[str, str] = MESSAGES["start_and_end"]["statuses"]


def init_deadlock(case: Case, graph: Graph) -> Verdict | None:
    """Look for ranks that wait in the start-up of the job, and for the one that has not arrived."""
    if case.lost:
        return None
    waiters, sources = graph.waiting_ranks, graph.source_ranks
    starting = [s for s in waiters if s.wait.kind == "store" or "init" in s.wait.phases]
    late = [s for s in sources if not s.wait.phases & {"cleanup", "error"}]
    all_start = len(starting) == len(waiters)
    if starting and all_start and late:
        return init_verdict(case, graph, late, f"has not reached {operation(starting[0])}")
    loading = [s for s in late if s.wait.kind in ("import", "load")]
    if loading and waiters and len(loading) == len(sources):
        return init_verdict(case, graph, loading, f"is still in {loading[0].wait.operation}", "medium")
    if sources or not starting:
        return None
    if all_start:
        return all_starting(case, graph, starting)
    others = [s for s in waiters if s not in starting]
    if len(starting) > len(others) and all("init" in s.wait.phases for s in starting):
        return init_verdict(
            case, graph, others, f"has not called {operation(starting[0])}, which every rank must call"
        )
    if len(starting) <= len(others) or all(s.wait.kind == "store" for s in starting):
        return init_verdict(
            case, graph, starting, f"is in {operation(starting[0])}, which every rank must call"
        )
    return None


def all_starting(case: Case, graph: Graph, starting: list[Process]) -> Verdict:
    """Return the verdict when every rank is in the start-up: at different places some are culprits,
    at one place none is.
    """
    if len(graph.waiting) > 1:
        odd = [s for cluster in graph.waiting[1:] for s in cluster.members]
        tie = len(graph.waiting[0].members) == len(graph.waiting[1].members)
        fact = "is at another place of the start-up"
        return init_verdict(case, graph, starting if tie else odd, fact, "medium")
    best: Confidence = "high" if starting[0].wait.kind == "store" else "medium"
    return make_verdict(
        "init_deadlock",
        confidence(case, graph, starting, best),
        (),
        f"{'All' if starting[1:] else 'The only rank read:'} {wait_in(starting)} at {place(starting[0])}: "
        "the cause is outside these ranks (the store's host, the network, a rank that was never started).",
        waiting_evidence(graph) + stillness(case),
        "together",
    )


def init_verdict(
    case: Case, graph: Graph, culprits: list[Process], fact: str, best: Confidence = "high"
) -> Verdict:
    """Return the verdict that blames `culprits`, with `fact` in the summary and the evidence."""
    peers = [s for s in graph.waiting_ranks if s not in culprits]
    others = f"; {wait_in(peers)}" if peers else ""
    verb, _, rest = fact.partition(" ")
    said = f"{plural(culprits, verb, 'have' if verb == 'has' else 'are')} {rest}"
    return make_verdict(
        "init_deadlock",
        confidence(case, graph, culprits, best),
        culprits,
        f"{begin(name_ranks(culprits))} {said}: {plural(culprits, 'it', name_ranks(culprits[:1]))} is at {place(culprits[0])}{others}.",
        stack_evidence(culprits, fact, graph) + waiting_evidence(graph, culprits) + stillness(case),
    )


def cleanup_deadlock(case: Case, graph: Graph) -> Verdict | None:
    """Look for ranks that are exiting."""
    entered = functions_of_entered(case)
    leaving = leaving_ranks(case, entered)
    if not leaving:
        return None
    staying = [s for s in graph.waiting_ranks if s not in leaving]
    # If no rank trains any more, a rank that only waits for its peers is a victim of one that
    # waits for something else.
    held_up = [s for s in leaving if not s.wait.waits_for_peers]
    if not staying and not held_up and any(s not in leaving for s in graph.source_ranks):
        return None  # they wait for one that is not exiting
    culprits = leaving if staying else held_up or leaving
    certain = bool(staying) and all(last_call(s) or in_exit_handler(s, entered) for s in culprits)
    what = operation(culprits[0])
    others = (
        f"{name_ranks(staying)} still {plural(staying, 'waits', 'wait')} in {operation(staying[0])}"
        if staying
        else "the others are exiting too"
        if len(leaving) > len(culprits)
        else "no rank waits for it any more"
    )
    return make_verdict(
        "cleanup_deadlock",
        confidence(case, graph, culprits, "high" if certain else "medium"),
        culprits,
        f"{begin(name_ranks(culprits))} {plural(culprits, 'is', 'are')} exiting ({what} at {place(culprits[0])}) "
        f"while {others}.",
        stack_evidence(culprits, f"exiting: {what}", graph)
        + waiting_evidence(graph, culprits)
        + stillness(case),
    )


def last_call(process: Process) -> bool:
    """True for exit functions that no training step calls: sufficient for high confidence."""
    called = {frame.function for frame in process.wait.frames}
    return process.wait.kind == "destroy" or bool(called & LAST_CALLS)


def functions_of_entered(case: Case) -> set[tuple[str, str]]:
    """Return name and file of each function in the stacks that begin in a module, a thread or a
    spawned process.
    """
    waits = {id(s.wait): s for s in case.ranks}  # equal ones are one object
    return {(f.function, f.file) for s in waits.values() if has_entry(s) for f in s.wait.frames}


def leaving_ranks(case: Case, entered: set[tuple[str, str]]) -> list[Process]:
    judged: dict[tuple[int, str, str], bool] = {}
    leaving = []
    for process in case.ranks:
        key = (id(process.wait), process.thread, process.status)
        if key not in judged:
            judged[key] = leaves(process, entered)
        if judged[key]:
            leaving.append(process)
    return leaving


def leaves(process: Process, entered: set[tuple[str, str]]) -> bool:
    """True if a stack is that of an exiting rank: a clean-up function, or an exit handler that
    Python itself calls.
    """
    wait = process.wait
    if wait.kind in ("data", "stopped", "launcher") or process.status == "stopped":
        return False
    if any(f.file.endswith("weakref.py") and f.function == "__call__" for f in wait.frames):
        return False  # a finalizer of an object, which runs wherever that is freed
    if wait.kind == "future" and wait.operation == "pool result":
        return False
    if context(wait.frames, frozenset({"cleanup", "checkpoint"})) == "checkpoint":
        return False
    return "cleanup" in wait.phases or in_exit_handler(process, entered)


def in_exit_handler(process: Process, entered: set[tuple[str, str]]) -> bool:
    """True for an atexit callback: C calls it, so its stack has no `<module>` at the bottom, while
    its peers' stacks have one.
    """
    python = process.wait.python
    if process.thread != "MainThread" or not 0 < len(python) < 100 or has_entry(process):
        return False
    # An excerpt that was cut ends in a library, or in a function that its peers call as well.
    last = (python[-1].function, python[-1].file)
    return bool(entered) and not is_library(python[-1].file) and last not in entered


def has_entry(process: Process) -> bool:
    return any(f.function in MODULE_ENTRIES for f in process.wait.python[-6:])


def missing_rank(case: Case, graph: Graph) -> Verdict | None:
    """Look for ranks without a process that can be dumped, and for stopped ones."""
    stopped = [s for s in case.ranks if s.status == "stopped" or s.wait.kind == "stopped"]
    lost: dict[Rank, str] = dict(case.lost.items())
    lost |= {s.rank: "stopped" for s in stopped if s.rank is not None}
    waiters = [s for s in graph.waiting_ranks if s not in stopped]
    if not lost:
        return died_before(case, graph) or never_joined(case, graph)
    if not case.ranks or (not waiters and len(stopped) < len(case.ranks)) or case.snapshot.endings:
        return None
    who = f"{'Rank' if len(lost) == 1 else 'Ranks'} {rank_ranges(lost)}"
    statuses = [
        status for status in ("gone", "stopped", "not_permitted", "timed_out") if status in lost.values()
    ]
    return make_verdict(
        "missing_rank",
        certainty_of_loss(case, graph, lost, stopped),
        tuple(lost),
        f"{who} {STATUS_TEXTS[next(iter(lost.values()))]}; {waiting_for(graph)}.",
        loss_evidence(case, lost, stopped) + waiting_evidence(graph),
        steps=tuple(step for status in statuses for step in steps_of("missing_rank", status)),
    )


def died_before(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict for a process whose end a log has before its peers timed out, or while
    they wait. Its rank is known where it is the only one below theirs that did not time out.
    """
    for log in case.snapshot.logs:
        ranks = {rank for rank, _, _ in watchdog_timeouts(log)}
        waited = graph.waiting if case.ranks else ranks
        until = takewhile(lambda line: "operation timeout" not in line, log.lines if waited else ())
        died = next(filter(None, map(DIED.search, until)), None)
        if died:
            waits, others = waiting_for(graph), only_absent(ranks)
            peers = f" before {ranks_text(sorted(ranks))} timed out" if ranks else f", and {waits}"
            who = f"rank {others[0]}" if others else "no message names its rank"
            said = Evidence("", died.string[died.start() :].strip()[:200], log.name)
            summary, evidence = f"A process of the job ended{peers}: {who}.", (said, *waiting_evidence(graph))
            return make_verdict("missing_rank", "medium", others, summary, evidence, "gone")
    return None


def never_joined(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict for a store barrier whose own count is lower than the world size: the rank
    that did not join it is not among the ranks that were read.
    """
    lines = [(line, log.name) for log in case.snapshot.logs for line in log.lines]
    complete = {m[1] for line, _ in lines if (m := STORE_COMPLETE.search(line))}
    counts = [
        (int(m["world"]), int(m["workers"]), name)
        for line, name in lines
        for pattern in STORE_BARRIER
        if (m := pattern.search(line)) and m["key"] not in complete
    ]
    if not counts or graph.sources or any(s.wait.kind != "store" for s in case.ranks):
        return None
    world, workers, name = max(counts, key=lambda count: count[1])
    if workers >= world or len(case.ranks) > workers:
        return None
    joined = Evidence("", f"its log: {workers} of {world} workers have joined", name)
    return make_verdict(
        "missing_rank",
        "medium" if case.ranks else "low",
        (),
        f"{world - workers} of {world} ranks never joined the store: {waiting_for(graph)}.",
        (joined, *waiting_evidence(graph)),
        "never_joined",
    )


def certainty_of_loss(case: Case, graph: Graph, lost: dict[Rank, str], stopped: list[Process]) -> Confidence:
    """Return high for a rank that is known to be gone or stopped, low for one that could not be
    read.
    """
    if not set(lost.values()) <= {"gone", "stopped"} or waiters_move(graph):
        return "low"
    elsewhere = [s for s in graph.source_ranks if s not in stopped]
    failing = any(s.wait.phases & {"cleanup", "error"} for s in elsewhere)
    unsure = case.num_samples < 2 or len(lost) > len(case.ranks) or failing
    return LEVELS[1 if unsure else 2]


def loss_evidence(case: Case, lost: dict[Rank, str], stopped: list[Process]) -> tuple[Evidence, ...]:
    found = [
        Evidence(str(rank), f"rank {rank} {STATUS_TEXTS[status]}", process=f"rank_{rank}")
        for rank, status in list(lost.items())[:8]
    ]
    found += [
        Evidence(str(s.rank), f"was stopped at {show(s.wait.frame)}", s.name)
        for s in stopped[:4]
        if s.wait.frame
    ]
    for error in case.snapshot.errors:
        if error.rank in lost:
            first = f"its error file: {error.message.splitlines()[0][:200]}" if error.message else ""
            found.append(Evidence(str(error.rank), first or "left an error file"))
    for log in case.snapshot.logs:
        if log.rank in lost and log.lines:
            found.append(Evidence(str(log.rank), f"last line of its log: {log.lines[-1][:200]}"))
    return tuple(found)
