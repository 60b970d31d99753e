"""A rank left the normal path because of an error, and its peers wait for it.

What it looks like: one rank is in an error handler, a retry loop, a sleep before the next attempt,
a debugger, or idles after its engine failed; the others are in the collective that it should have
reached.

Common causes: `except Exception: continue` around a step with collectives in it; retrying after
out-of-memory on one rank only; pdb in a job without a terminal; an engine whose scheduler died
while its server still responds.

What helps: let the exception end the rank, or agree on it first (an all_reduce of an error flag,
torchelastic's @record).
"""

from hangdoctor.case import Case, ProcessState
from hangdoctor.graph import Graph
from hangdoctor.model import Confidence, Evidence
from hangdoctor.rules.verdict import LEVELS, Verdict, source_verdict, step
from hangdoctor.tables import phases_of

REFUTE = (
    "The culprit reaches the collective in a later sample: then it was only slow.",
    "No exception in that rank's log before this moment.",
)


def judge(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict if the pattern is present, else None."""
    # An error handler may wait for its peers itself, in a collective that they will not reach.
    apart = graph.source_ranks if len(graph.waiting) < 2 else case.ranks
    strong = [s for s in apart if s.thread_wait.kind == "prompt" or in_own_error(s, graph)]
    asleep = [
        s
        for s in graph.source_ranks
        if s.thread_wait.kind in ("sleep", "idle", "event")
        and s not in strong
        and not s.thread_wait.phases & {"engine", "outside"}
    ]
    culprits = strong or asleep
    if not culprits or (not graph.waiting and not strong):
        return None
    failed = failures(case, culprits)
    best: Confidence = (
        "high" if strong and not {"data", "checkpoint"} & strong[0].thread_wait.phases else "medium"
    )
    if asleep and not strong and not failed:
        best = "low" if asleep[0].thread_wait.kind == "event" else "medium"
    return source_verdict(
        "partial_exception",
        case,
        graph,
        culprits,
        what_of(culprits[0]),
        (
            step(
                "grep -n -A20 Traceback LOG_OF_THAT_RANK",
                "the first exception in time is the cause; later ones follow from it",
            ),
            step("cat $TORCHELASTIC_ERROR_FILE", "torchelastic keeps the first exception of each rank"),
            step(
                "areal-debug hang collect --to LATER",
                "a retry loop changes its line between samples; the peers do not",
            ),
        ),
        REFUTE,
        LEVELS[min(LEVELS.index(best) + bool(failed), 2)],
        failed,
    )


def in_own_error(process_state: ProcessState, graph: Graph) -> bool:
    """True if the stack contains an error path that its peers' stacks lack: a retry wrapper around
    all ranks proves nothing.
    """
    if "error" not in process_state.thread_wait.phases:
        return False
    shared = [{(f.function, f.file) for f in c.thread_wait.frames} for c in graph.waiting[:8]]
    handlers = {
        (f.function, f.file)
        for f in process_state.thread_wait.frames
        if not f.native and "error" in phases_of(f.function, f.file)
    }
    return any(not all(handler in frames for frames in shared) for handler in handlers) or not shared


def what_of(process_state: ProcessState) -> str:
    kind = process_state.thread_wait.kind
    if kind == "prompt":
        return "at a prompt without a user"
    if "error" in process_state.thread_wait.phases:
        return "in an error path"
    return {"sleep": "in a sleep", "idle": "in an idle loop"}.get(kind, "outside the step")


def failures(case: Case, culprits: list[ProcessState]) -> tuple[Evidence, ...]:
    """Return the exceptions in the culprits' error files and logs."""
    ranks = {s.rank for s in culprits}
    found = [
        Evidence(str(error.rank), f"its error file: {error.message[:200]}")
        for error in case.snapshot.errors
        if error.rank in ranks
    ]
    for log in case.snapshot.logs:
        line = next((line for line in reversed(log.lines) if "Error" in line or "Traceback" in line), None)
        if log.rank in ranks and line:
            found.append(Evidence(str(log.rank), f"its log: {line[:200]}", log.name))
    return tuple(found)
