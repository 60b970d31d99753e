"""Logs and stacks as people post them: other prefixes, broken lines, several groups."""

# ruff: noqa: E501 -- lines of logs stay whole

import tomllib
from pathlib import Path

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
OLD = "[E ProcessGroupNCCL.cpp:566] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(OpType={op}, Timeout(ms)=1800000) ran for 1802713 milliseconds before timing out."
BARRIER = """  File "/usr/lib/python3.7/lightning/trainer.py", line 1384, in save_checkpoint
    self.strategy.barrier("save")
  File "/usr/lib/python3.7/torch/distributed/distributed_c10d.py", line 3696, in barrier
    work = group.barrier(opts=opts)
RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=9, OpType=BARRIER), but Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=9, OpType=ALLREDUCE, TensorShape=[1])."""
INFO_THREADS = """(gdb) info threads
  Id   Target Id         Frame
* 1    Thread 0x7fc7 (LWP 52422) "" select_poll_poll () at /src/selectmodule.c.h:219
  2    Thread 0x7fc6 (LWP 52574) "python" 0x00007fc7 in accept4 (fd=7, flags=5) at ../accept4.c:40
"""
ASKING = """Process 40: VLLM::EngineCore
Thread 40 (idle): "MainThread"
    dequeue (vllm/distributed/device_communicators/shm_broadcast.py:794)
    get_response (vllm/v1/executor/multiproc_executor.py:387)
    step (vllm/v1/engine/core.py:59)
Process 41: ray::RayWorkerProc
Thread 41 (idle): "MainThread"
    dequeue (vllm/distributed/device_communicators/shm_broadcast.py:794)
    worker_busy_loop (vllm/v1/executor/multiproc_executor.py:870)
"""
EPOCH = """  File "train.py", line 80, in epoch
    for batch in loader:
  File "/usr/lib/python3.7/torch/utils/data/dataloader.py", line 830, in _next_data
    self._shutdown_workers()
  File "/usr/lib/python3.7/torch/utils/data/dataloader.py", line 942, in _shutdown_workers
    w.join()
  File "/usr/lib/python3.7/multiprocessing/process.py", line 140, in join
    res = self._popen.wait(timeout)
KeyboardInterrupt
"""
FURTHER = "[rank{r}]:[E1 10:00:00.2 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {r}] Exception (either an error or timeout) detected by watchdog at work: {n}, last enqueued NCCL work: {e}, last completed NCCL work: {c}."
CONTAINER = """    _bootstrap (threading.py:1032)
Thread 12816 (idle): "Thread-10 (watchdog_thread)"
    select (selectors.py:415)
    pyspy_dump_schedulers (utils/common.py:2218)
Process 309: sglang::scheduler_TP6
Thread 309 (active): "MainThread"
    _apply (penaltylib/min_new_tokens.py:78)
    event_loop_normal (scheduler.py:800)
"""
CASES = {
    "a rank has completed what another waits in": (
        FURTHER.format(r=0, n=122, e=127, c=121) + "\n" + FURTHER.format(r=1, n=126, e=128, c=125),
        "collective_mismatch",
        (0, 1),
        "rank 0 waits in collective 122 of its group, and rank 1 has completed",
    ),
    "a container's log that begins in the middle": (
        "".join(f"sglang-1  | {line}\n" for line in CONTAINER.splitlines()),
        "straggler_or_not_hung",
        (),
        "only post was read: it is working at _apply",
    ),
    "watchdogs without numbers": (
        OLD.format(r=1, op="ALLREDUCE") + "\n" + OLD.format(r=0, op="BROADCAST"),
        "collective_mismatch",
        (0, 1),
        "of a collective of group default: rank 0 has broadcast, rank 1 has allreduce",
    ),
    "one operation without a number": (
        OLD.format(r=1, op="ALLREDUCE") + "\n" + OLD.format(r=0, op="ALLREDUCE"),
        "nccl_timeout",
        (),
        "rank 0 in allreduce, rank 1 in allreduce; whether",
    ),
    "a traceback of the rank that its error names": (
        BARRIER, "collective_mismatch", (0, 1), "rank 0 has allreduce, rank 1 has barrier; rank 1 is at barrier"
    ),
    "gdb's table of threads": (INFO_THREADS, "unknown", (), "it is at select_poll_poll (selectmodule.c.h)"),
    "an engine whose workers wait": (
        ASKING, "collective_mismatch", (), "the engine waits for a reply to a step at dequeue"
    ),
    "a loader that ends its workers": (EPOCH, "dataloader_stall", (), "waits for data at epoch (train.py:80)"),
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
        "rank 1 has allgather, rank 7 has reduce",
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


POSTS = tomllib.loads(Path(__file__).with_name("posts.toml").read_text(encoding="utf-8"))
CASES |= {name: (p["text"], p["label"], tuple(p.get("culprits", ())), p["says"]) for name, p in POSTS.items()}


@pytest.mark.parametrize("name", CASES)
def test_post_is_read(tmp_path, name):
    text, label, culprits, says = CASES[name]
    (tmp_path / "post.txt").write_text(text)
    found = diagnose(read_snapshot([tmp_path / "post.txt"]))
    said = f"{found.summary} ({found.confidence})".lower()
    assert (found.label, says in said, "watchdog_timeout" in said) == (label, True, False), said
    assert not culprits or tuple(found.culprit_ranks) == culprits
