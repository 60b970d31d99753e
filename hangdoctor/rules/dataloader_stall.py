"""A rank waits for data while its peers wait for it.

What it looks like: one rank is in the data loader (`_try_get_data`, a dataset's `__getitem__`), the
others in the first collective of the step. The stack of its worker process shows why: a lock, a
read from storage, a decoder, or the worker is dead.

Common causes: a worker forked while a thread held a lock (set multiprocessing_context="spawn",
start workers early); storage that does not respond; a full /dev/shm; a worker killed for memory; an
endless sample.

If the rank has left the loop instead (its loader was shorter), that is a collective_mismatch: use
drop_last or Join.
"""

from hangdoctor.case import Case, ProcessState
from hangdoctor.frames import show
from hangdoctor.graph import Graph
from hangdoctor.model import Evidence
from hangdoctor.rules.verdict import Verdict, source_verdict, step

LOADERS = ("torch/utils/data/", "torchdata/", "webdataset/")


def judge(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict if the pattern is present, else None."""
    starved = [s for s in graph.source_ranks if waits_for_data(s)]
    if not starved:
        return None
    return source_verdict(
        "dataloader_stall",
        case,
        graph,
        starved,
        "for data",
        (
            step(
                "areal-debug hang collect --to FOLDER",
                "the stacks of its workers show whether it is a lock, storage or a decoder",
            ),
            step(
                "DataLoader(..., timeout=120)",
                "turns a silent stall into an exception that names the worker",
                "none",
            ),
            step(
                "DataLoader(..., multiprocessing_context='spawn')",
                "workers that inherit no held locks",
                "slower start of workers",
            ),
            step("df -h /dev/shm", "full shared memory stops workers without a message"),
        ),
        ("Workers whose CPU time grows between samples: then the data is slow, not stuck.",),
        "high" if len(starved) < len(case.ranks) else "medium",
        workers(case, starved),
    )


def waits_for_data(process_state: ProcessState) -> bool:
    thread_wait = process_state.thread_wait
    if thread_wait.phases & {"cleanup"} or thread_wait.kind in ("stopped", "running", "compile"):
        return False
    if thread_wait.kind in (
        "http",
        "rpc",
        "subprocess",
        "prompt",
    ):  # a function called fetch_samples may query a server; a thread behind a loader's queue loads
        main = process_state.threads[0].thread_wait
        loads = main.kind in ("queue", "data") and "data" in main.phases
        return loads or any(frame.file.startswith(LOADERS) for frame in thread_wait.frames)
    return thread_wait.kind == "data" or "data" in thread_wait.phases


def workers(case: Case, starved: list[ProcessState]) -> tuple[Evidence, ...]:
    """Return the waits of the worker processes of the starved ranks."""
    found = []
    for process_state in starved[:4]:
        for child in case.children_of(process_state.name)[:4]:
            if child.thread_wait.frame:
                fact = f"its worker waits in {child.thread_wait.operation or child.thread_wait.kind} at {show(child.thread_wait.frame)}"
                found.append(Evidence(str(process_state.rank), fact, child.name, child.thread))
    return tuple(found)
