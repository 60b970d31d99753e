"""Rules for jobs that are dead: who failed first, who waited, what the launcher did to whom.

Who waited until a time-out is a victim. A rank that is known only because it did not fail may be
anywhere: it is the culprit at less than high confidence. Without a time-out nothing hung.
"""

from hangdoctor.case import Case
from hangdoctor.frames import show
from hangdoctor.graph import Graph, rank_ranges
from hangdoctor.model import Confidence, Ending, Evidence, Label
from hangdoctor.parse.logs import first_match
from hangdoctor.rules.verdict import (
    Verdict,
    begin,
    behind_by_steps,
    make_verdict,
    name_ranks,
    operation,
    place,
    plural,
    ranks_text,
    stack_evidence,
    wait_in,
    waiting_evidence,
    waiting_for,
)
from hangdoctor.tables import MESSAGES, message
from hangdoctor.waits import ThreadState

RETRIES, STUCK = message("ended", "retries"), message("progress", "watchdog_stuck")
HOW: dict[str, str] = MESSAGES["ended"]["how"]


def ended_otherwise(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict for a job that ended without a hang: nobody in it timed out."""
    endings, stopped = case.snapshot.endings, case.snapshot.stopped
    if not endings and not stopped:
        return None
    ended = {e.rank for e in endings}
    waited = any(e.how == "timed_out" or e.named for e in endings) or bool(case.snapshot.records)
    waited |= any(s.rank not in ended for s in graph.waiting_ranks)
    waited |= first_match(case.snapshot.logs, STUCK) is not None
    if waited and not case.snapshot.recovered:
        return None
    failed = [e for e in endings if e.how in ("failed", "killed")]
    lost = [e.rank for e in endings if e.how == "lost_peer"]
    apart = [s for s in graph.source_ranks if s.wait.kind != "running"]
    blamed: tuple[int, ...] = ()
    if stopped and not failed and graph.waiting and apart:
        return None  # dumps at the end show who waits for whom
    if failed:
        culprit = min(failed, key=lambda e: (not e.first, e.rank))
        written = any(log.rank is not None for log in case.snapshot.logs)
        known = written or case.snapshot.complete or culprit.how == "killed"
        who = f"rank {culprit.rank}" if known else "a rank that the log does not name"
        what = f"{who} {HOW[culprit.how]} ({culprit.words[:200]})"
        if len(failed) > 1 and not culprit.first:
            what += ", and so did others: separate logs do not show who was first, torchrun's report does"
        others = f", and {ranks_text(lost)} lost {plural(lost, 'its', 'their')} peer" if lost else ""
        summary = f"Nothing shows a hang: {what}{others}."
        blamed = (culprit.rank,) if known else ()
    elif stopped:
        behind, fact = behind_by_steps(case)
        shown = f"{begin(ranks_text(behind))} {fact}" if behind else "Nothing shows a hang"
        summary = f"{shown}: the job was ended from outside ({stopped})."
    else:
        who = f"{begin(ranks_text(lost))} lost a peer, and no" if lost else "No"
        summary = f"{who} log says which failed."
    if case.snapshot.recovered:
        summary += " A later attempt ran on."
    return make_verdict("unknown", "low", blamed, summary, (), "records")


def absent_at_the_end(case: Case, graph: Graph) -> Verdict | None:
    """Look for ranks without a stack that the others of a dead job have waited for."""
    absent = [e for e in case.snapshot.endings if e.rank in case.lost]
    waited = [e.rank for e in case.snapshot.endings if e.how in ("timed_out", "lost_peer")]
    told = any(e.named for e in absent) or first_match(case.snapshot.logs, STUCK)
    if not absent or not (waited or graph.waiting or told):
        return None
    broken = [e for e in absent if e.how in ("failed", "killed")]
    named = [e for e in absent if e.named]
    blamed = broken or named or absent
    label, level = label_of(case, blamed)
    who = f"{plural(blamed, 'Rank', 'Ranks')} {rank_ranges(e.rank for e in blamed)}"
    known = f"ranks {rank_ranges(waited)}" if waited else f"{plural(blamed, 'its', 'their')} peers"
    others = (
        waiting_for(graph)
        if graph.waiting
        else f"{known} waited for {plural(blamed, 'it', 'them')} until a time-out"
    )
    how = HOW[blamed[0].how] if not named else "did not arrive"
    last = last_lines(case, blamed)
    seen = f" Its last line: {last[0].fact.partition(': ')[2]}" if last else ""
    return make_verdict(
        label,
        level,
        tuple(e.rank for e in blamed),
        f"{who} {how} ({blamed[0].words[:200]}); {others}.{seen}",
        last + waiting_evidence(graph),
        "gone" if label == "missing_rank" else "",
    )


def failed_in_wait(case: Case, graph: Graph) -> Verdict | None:
    """Look for ranks that failed and then waited for their peers, in a handler or at the exit."""
    failed = {e.rank: e for e in case.snapshot.endings if e.how == "failed"}
    waiting = [s for s in case.ranks if s.rank in failed]
    if not waiting or len(graph.waiting) + len(graph.sources) < 2:
        return None
    first = waiting[0]
    words = next(e.words for e in failed.values() if e.rank == first.rank)
    others = [s for s in graph.waiting_ranks if s not in waiting]
    summary = f"{begin(name_ranks(waiting))} failed ({words[:200]}) and then waited in {operation(first)} at {place(first)}"
    return make_verdict(
        "partial_exception",
        "medium",
        waiting,
        f"{summary}{f'; {wait_in(others)}' if others else ''}.",
        stack_evidence(waiting, f"waits in {operation(first)} after its error", graph)
        + waiting_evidence(graph, waiting),
    )


def threads_still(case: Case, graph: Graph) -> Verdict | None:
    """Look for a rank of a dead job whose main thread and another one both stand in the program's
    own code: a dump shows a lock that C takes as the line that takes it.
    """
    timed_out = any(e.how == "timed_out" for e in case.snapshot.endings)
    found = [s for s in graph.source_ranks if timed_out and len([t for t in s.threads if in_program(t)]) > 1]
    if not found or len(found) == len(case.ranks):
        return None
    fact = f"{begin(name_ranks(found))} stood still in two threads of the program, one at {place(found[0])}"
    evidence = stack_evidence(found, "did not go on here", graph)
    evidence += tuple(
        Evidence(str(s.rank), f"another thread of it is at {show(t.wait.chain[0])}", s.name)
        for s in found
        for t in s.threads[1:]
        if in_program(t)
    )
    summary = f"{fact}: inferred from the stacks, two locks or a slow loop; {waiting_for(graph)}."
    return make_verdict("lock_deadlock", "low", found, summary, evidence)


def in_program(thread: ThreadState) -> bool:
    """True if the innermost frame of a thread is the program's own."""
    wait = thread.wait
    return wait.kind in ("running", "blocked") and bool(wait.chain) and wait.frames[0] == wait.chain[0]


def label_of(case: Case, blamed: list[Ending]) -> tuple[Label, Confidence]:
    """Return the label for ranks without a stack, by their last lines where these show an error."""
    if blamed[0].how == "failed":
        return "partial_exception", "medium"
    if blamed[0].how == "killed":
        return "missing_rank", "medium"
    ranks = {e.rank for e in blamed}
    last = [line for log in case.snapshot.logs if log.rank in ranks for line in log.lines[-3:]]
    if any(RETRIES.search(line) for line in last):
        return "partial_exception", "medium"
    return "missing_rank", "medium" if blamed[0].named else "low"


def last_lines(case: Case, blamed: list[Ending]) -> tuple[Evidence, ...]:
    """Return the last line that each of these ranks wrote."""
    last = {log.rank: log for log in case.snapshot.logs if log.lines}
    return tuple(
        Evidence(str(e.rank), f"last line of its log: {last[e.rank].lines[-1][:200]}", last[e.rank].name)
        for e in blamed[:8]
        if e.rank in last
    )


def end_evidence(case: Case) -> tuple[Evidence, ...]:
    """Return who failed first, and how the ranks of a dead job ended."""
    endings = case.snapshot.endings
    found = [Evidence(str(e.rank), f"failed first: {e.words[:200]}") for e in endings if e.first]
    for how, text in HOW.items():
        if ranks := [e.rank for e in endings if e.how == how and not e.named]:
            found.append(Evidence(rank_ranges(ranks), text))
    found += [Evidence(str(e.rank), f"others waited for it: {e.words[:200]}") for e in endings if e.named]
    return tuple(found)
