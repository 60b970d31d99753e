"""A rank waits for something outside the job: an HTTP server, an RPC, storage, a child process.

What it looks like: one rank is in a socket read, an HTTP client, ray.get, subprocess.wait or a
process pool, without a time-out; its peers wait in the collective that distributes the result.

Common causes: a dead or overloaded inference server behind a connection that was never closed; a
reward process that loops in untrusted code; an upload command that prompts for a password; storage
that does not respond.

A launcher or driver alone waits for its children: it is never the cause beside ranks that wait.

What helps: a time-out on every external wait, and retries that all ranks agree on.
"""

import re

from hangdoctor.case import Case, ProcessState
from hangdoctor.frames import show
from hangdoctor.graph import Graph
from hangdoctor.model import Confidence, Evidence
from hangdoctor.rules.verdict import Verdict, source_verdict, step
from hangdoctor.tables import WORKER_LOOP

REMOTE = {
    "storage": "for remote storage",
    "service": "for a remote service",
    WORKER_LOOP: "for a task from its driver",
}
OUTSIDE = {
    "http": "for an HTTP response",
    "rpc": "for a remote call",
    "subprocess": "for a child process",
    "socket": "for bytes from a socket",
    "queue": "for a message from another process or thread",
    "future": "for the result of another thread or process",
    "file": "for a read or write of a file",
    "join": "for a thread or process to end",
    "launcher": "for the processes it started",
}


def judge(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict if the pattern is present, else None."""
    outside = [
        s for s in graph.source_ranks if s.thread_wait.kind in OUTSIDE or polls_outside(s, not graph.waiting)
    ]
    if not outside:
        return None
    kind = outside[0].thread_wait.kind
    best: Confidence = (
        "high" if kind in ("http", "rpc", "subprocess") or children(case, outside) else "medium"
    )
    return source_verdict(
        "external_wait",
        case,
        graph,
        outside,
        REMOTE.get(outside[0].thread_wait.operation) or OUTSIDE.get(kind, "for samples, rewards or a server"),
        (
            step("ss -tnp | grep PID", "shows the address it waits for, and whether bytes are queued"),
            step("curl -m 5 http://SERVER/health", "is the server alive?"),
            step("requests.get(..., timeout=60)", "a wait without a time-out cannot end by itself", "none"),
        ),
        ("The other side responds within its usual time: then this is a slow request.",),
        best,
        children(case, outside),
    )


def polls_outside(process_state: ProcessState, alone: bool) -> bool:
    """True if a rank sleeps or idles between requests to an engine or a reward service: `while not
    ready: sleep` in a rollout.
    """
    wait = process_state.thread_wait
    if wait.operation == WORKER_LOOP:
        return alone  # a worker that nobody gave a task, and no rank that waits for it
    if "outside" not in wait.phases:
        return False
    polls = wait.frame is not None and re.search("wait|poll", wait.frame.function)
    return wait.kind in ("sleep", "idle", "event") or (wait.kind == "blocked" and bool(polls))


def children(case: Case, process_states: list[ProcessState]) -> tuple[Evidence, ...]:
    """Return the waits of the child processes that may be waited for."""
    found = []
    for process_state in process_states[:4]:
        for child in case.children_of(process_state.name)[:4]:
            frame = child.thread_wait.frame
            fact = f"its child process is in {child.thread_wait.operation or child.thread_wait.kind}"
            found.append(
                Evidence(str(process_state.rank), f"{fact} at {show(frame)}" if frame else fact, child.name)
            )
    return tuple(found)
