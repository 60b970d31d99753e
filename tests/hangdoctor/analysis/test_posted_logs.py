"""Logs and stacks as people post them: other prefixes, broken lines, several groups."""

# ruff: noqa: E501 -- lines of logs stay whole

import pytest

from hangdoctor.diagnose import diagnose
from hangdoctor.parse.read import read_snapshot

TIMEOUT = "ProcessGroupNCCL.cpp:607] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={n}, OpType={op}, NumelIn={e}, NumelOut={e}, Timeout(ms)=600000) ran for 600026 milliseconds before timing out."
CAME = "ProcessGroupNCCL.cpp:1664] [PG {g} Rank {r}] Exception (either an error or timeout) detected by watchdog at work: {n}, last enqueued NCCL work: {n}, last completed NCCL work: {m}."


def late(rank, number, operation, size, group=""):
    """What the watchdog of a rank writes; without a group, its second line is missing."""
    facts = {"r": rank, "n": number, "op": operation, "e": size, "g": group, "m": number - 1}
    lines = [f"[rank{rank}]:[E1 10:00:00.1 {TIMEOUT.format(**facts)}"]
    return "\n".join([*lines, *([f"[rank{rank}]:[E1 10:00:00.2 {CAME.format(**facts)}"] if group else [])])


FINGERPRINT = "Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=9, OpType=ALLGATHER, TensorShape=[1], TensorDtypes=Long)), but Rank 7 is running collective: CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE)."
LOST = "[{r}]<stderr>:  what():  [gloo/transport/tcp/pair.cc:5] Read error [10.0.0.1]:39: Connection reset by peer"
MPI = """2 processes in {one}:
#0  0x00007f87 in MPIDI_Progress () from /usr/lib/libmpi.so.12
#1  0x00007f88 in PMPI_{one} () from /usr/lib/libmpi.so.12
"""
SCHEDULER = """[2026-01-29 13:12:37 PP{p} TP0] Scheduler watchdog timeout (self.watchdog_timeout=300)
Process {pid}: sglang::scheduler_PP{p}_TP0
Thread {pid} (idle): "MainThread"
    {wait}
    event_loop_pp (sglang/srt/managers/scheduler_pp_mixin.py:90)
"""
CASES = {
    "one rank names its group": (
        "\n".join(
            [
                late(7, 88, "BROADCAST", 5, "0 (default_pg)"),
                late(3, 88, "ALLREDUCE", 9),
                late(9, 88, "ALLREDUCE", 9),
            ]
        ),
        "collective_mismatch",
        (7,),
        "rank 7 and ranks 3,9",
    ),
    "lines that a mail broke": (
        "\n".join(f"pod-a [stderr] {late(r, 20, 'REDUCE', 1)}" for r in (4, 5)).replace(
            "timeout: ", "timeout: \n"
        ),
        "nccl_timeout",
        (),
        "reduce number 20",
    ),
    "two groups": (
        "\n".join([late(13, 216, "ALLTOALL", 7, "ID 11 PG GUID 119"), late(15, 57, "ALLREDUCE", 32, "ID 11 PG GUID 112")]),
        "nccl_timeout",
        (),
        "whether their peers reached these is not known",
    ),
    "fingerprint without a comma": (
        f"[RANK 1] [ERROR] Detected mismatch between collectives on ranks. {FINGERPRINT}",
        "collective_mismatch",
        (1, 7),
        "allgather where rank 7 has reduce",
    ),
    "NCCL's own report": (
        "init.cc:1247 NCCL WARN Mismatched collective detected, please check your calls at and around rank 39.",
        "collective_mismatch",
        (39,),
        "at and around rank 39",
    ),
    "barrier that names a rank": (
        "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please check rank 0 logs.",
        "missing_rank",
        (0,),
        "did not arrive",
    ),
    "a killed rank and its peers": (
        "\n".join(["[0]<stderr>:Killed", LOST.format(r=1), LOST.format(r=2)]),
        "unknown",
        (0,),
        "rank 0 was killed (killed), and ranks 1-2 lost their peer",
    ),
    "MPI": (
        MPI.format(one="Allreduce").replace("2 processes", "1 process") + MPI.format(one="Bcast"),
        "collective_mismatch",
        (0,),
        "all_reduce",
    ),
    "prose that leads to frames": (
        "on node-3 (rank 2-3) py-spy shows\n  reduce_scatter_tensor (distributed_c10d.py:4200)\n  step (train.py:77)\n"
        "while node-0 (rank 0-1) are here\n  all_to_all_single (distributed_c10d.py:4400)\n  step (train.py:71)\n",
        "collective_mismatch",
        (0, 1, 2, 3),
        "ranks 2-3 wait in reduce_scatter_tensor",
    ),
    "names in a logger's prefix": (
        SCHEDULER.format(p=0, pid=11, wait="synchronize (torch/cuda/streams.py:231)")
        + SCHEDULER.format(p=1, pid=22, wait="synchronize (torch/cuda/streams.py:231)"),
        "nccl_timeout",
        (),
        "all 2 ranks wait in a synchronisation with the device at synchronize",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_post_is_read(tmp_path, name):
    text, label, culprits, says = CASES[name]
    (tmp_path / "post.txt").write_text(text)
    found = diagnose(read_snapshot([tmp_path / "post.txt"]))
    assert (found.label, says in found.summary.lower()) == (label, True), found.summary
    assert not culprits or tuple(found.culprit_ranks) == culprits
    assert "watchdog_timeout" not in found.summary
