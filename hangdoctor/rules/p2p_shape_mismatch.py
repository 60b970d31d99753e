"""Send and receive calls, or pipeline stages, wait for each other.

What it looks like: ranks are in recv (or send) and no rank is on the other side: a ring in which
every rank receives first, two stages that disagree on the number of micro-batches or chunks, a
shape that one side announces and the other does not.

Common causes: recv before send in a ring (use batch_isend_irecv or let even ranks send first);
different micro-batch counts per stage; a shape exchanged only when it changes; a peer rank computed
with the wrong modulus.

A pipeline in which one stage is outside send/recv is a different case: that stage is the culprit.
"""

from hangdoctor.case import Case
from hangdoctor.graph import Graph
from hangdoctor.rules.verdict import (
    Verdict,
    apart,
    apart_evidence,
    confidence,
    ranks_of,
    step,
    stillness,
)


def judge(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict if the pattern is present, else None."""
    if graph.sources or case.lost:
        return None
    peers = [s for s in graph.waiting_ranks if s.thread_wait.kind == "p2p"]
    pipeline = any(s.thread_wait.domain == "pipeline" for s in peers)
    if not peers or (len(peers) < 2 and not pipeline and len(case.ranks) > 1):
        return None
    others = [c for c in graph.waiting if c.thread_wait.kind not in ("p2p", "device")]
    if len(others) > 1 or len(peers) * 2 < len(case.ranks):
        return None  # stages wait behind ranks that disagree on a collective
    everybody = len(peers) == len(case.ranks)
    return Verdict(
        "p2p_shape_mismatch",
        confidence(case, graph, peers, "high" if everybody else "low"),
        ranks_of(peers),
        f"{apart(graph, peers)}: no rank {'that was read ' if case.not_collected else ''}is on the other side.",
        apart_evidence(graph, peers) + stillness(case),
        (
            step(
                "TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1",
                "records sender, receiver and sizes of each message",
                "a few MB of memory",
            ),
            step(
                "dist.batch_isend_irecv([...])",
                "posts both directions at once, so that order no longer matters",
            ),
        ),
        ("A rank that is on the other side of one of these calls, or one that moves in a later sample.",),
    )
