"""Logs of jobs that are dead: consoles and torchrun's log folders, of ranks that timed out, failed,
were killed, or only did not fail.
"""

import pytest

from hangdoctor.diagnose import diagnose
from hangdoctor.parse.read import read_snapshot

TIME_OUT = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for recv operation to complete"
CUT_BARRIER = "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0."
PEER_GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:4126."
AGENT = "E1127 22:44:50.484 8395 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 1)\n"


def traceback(error: str, *frames: tuple[str, str, int]) -> str:
    lines = "".join(
        f'  File "{file}", line {line}, in {name}\n    {name}(x)\n' for name, file, line in frames
    )
    return f"Traceback (most recent call last):\n{lines}{error}\n"


def waiting(operation: str = "all_reduce", line: int = 30, error: str = TIME_OUT) -> str:
    file = "/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    frames = ("<module>", "/home/u/train.py", 90), ("main", "/home/u/train.py", line), (operation, file, 3913)
    return traceback(error, *frames)


DUMP = """Current thread 0x00007f10cbbd2b80 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 706 in readinto
  File "/usr/lib/python3.11/http/client.py", line 286 in _read_status
  File "/home/u/train.py", line 21 in score
  File "/home/u/train.py", line 90 in <module>
"""


def prefixed(rank: int, text: str, before: str = "") -> str:
    return "".join(f"{before}[rank{rank}]: {line}\n" for line in text.splitlines())


def report(codes: dict[int, int], first: int) -> str:
    """Return torchrun's report: exit codes by rank, the first one last."""

    def entry(rank: int) -> str:
        return f"[{rank}]:\n  time      : now\n  rank      : {rank} (local_rank: {rank})\n  exitcode  : {codes[rank]} (pid: {80 + rank})\n"

    others = "".join(entry(rank) for rank in codes if rank != first)
    return (
        f"{AGENT}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n{'=' * 60}\ntrain.py FAILED\nFailures:\n"
        f"{others}{'-' * 60}\nRoot Cause (first observed failure):\n{entry(first)}{'=' * 60}\n"
    )


def answer(path) -> tuple[str, tuple[int | str, ...]]:
    diagnosis = diagnose(read_snapshot([path]))
    return diagnosis.label, diagnosis.culprit_ranks


ENDED_1 = report({0: 1, 1: -15, 2: 1}, first=0)
TWO_TIME_OUTS = prefixed(0, waiting()) + prefixed(2, waiting())
NCCL = "".join(
    f"[rank{r}]:[E1114 21:17:00.6 ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=183, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=1500000) ran for 1500051 milliseconds\n"
    "frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<int>) + 0x23d (0x7f in /opt/libtorch_cuda.so)\n"
    for r in (0, 2)
)
DESYNC = "   [1] finished collective #182, but didn't join collective #183 (count from 1)\n"
PRINT = "Rank {r} is running collective: CollectiveFingerPrint(SequenceNumber={n}, OpType={op}, TensorShape=[8], TensorDtypes=Float"
MISMATCH = "".join(
    prefixed(
        r,
        waiting(
            name,
            error=f"RuntimeError: Detected mismatch between collectives on ranks. {PRINT.format(r=r, n=n, op=op)}",
        ),
    )
    for r, name, n, op in (
        (0, "all_reduce", 12, "ALLREDUCE"),
        (1, "broadcast", 11, "BROADCAST"),
        (2, "all_reduce", 12, "ALLREDUCE"),
    )
)
STORE = "torch.distributed.DistStoreError: wait timeout after 12000ms, keys: /default_pg/0//cpu//0/1"
INIT = waiting("init_process_group", error=STORE)


@pytest.mark.parametrize(
    ("log", "label", "culprits"),
    [
        (TWO_TIME_OUTS + ENDED_1, "missing_rank", (1,)),
        (TWO_TIME_OUTS + DUMP + ENDED_1, "external_wait", (1,)),
        (TWO_TIME_OUTS + "rank 1: out of memory; retry 1/100 in 300 s\n" + ENDED_1, "partial_exception", (1,)),
        (TWO_TIME_OUTS + prefixed(1, waiting("broadcast", 40)) + report({0: 1, 1: 1, 2: 1}, 0), "collective_mismatch", (1,)),
        (TWO_TIME_OUTS + prefixed(1, waiting()) + report({0: 1, 1: 1, 2: -15}, 0), "nccl_timeout", ()),
        (TWO_TIME_OUTS + prefixed(1, traceback("KeyError: 'x'", ("main", "/home/u/train.py", 40))) + ENDED_1, "partial_exception", (1,)),
        (
            TWO_TIME_OUTS
            + prefixed(1, traceback("KeyError: 'x'", ("main", "/home/u/train.py", 40)))
            + prefixed(1, "During handling of the above exception, another exception occurred:\n" + waiting("barrier", 44))
            + ENDED_1,
            "partial_exception",
            (1,),
        ),
        (NCCL + DESYNC + report({0: -6, 1: -15, 2: -6}, 0), "missing_rank", (1,)),
        (MISMATCH + report({0: 1, 1: 1, 2: 1}, 0), "collective_mismatch", (1,)),
        (INIT + INIT + ENDED_1, "missing_rank", (1,)),
        # One has left its loop early: it exits without an error, and its peers lose it.
        (prefixed(0, waiting(error=PEER_GONE)) + "[rank1]: epoch done\n" + prefixed(2, waiting(error=PEER_GONE)), "missing_rank", (1,)),
        (INIT + "srun: error: node1: task 1: Out Of Memory\n", "missing_rank", (1,)),
        ("[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 12000 ms\n" + TWO_TIME_OUTS + ENDED_1, "missing_rank", (1,)),
        # The head of the log is cut: outer calls that are missing are no exit handler,
        (
            prefixed(0, waiting("broadcast", 7).partition("<module>(x)\n")[2].replace("main", "sync"))
            + prefixed(1, waiting()) + prefixed(2, waiting()) + report({0: 1, 1: 1, 2: 1}, first=0),
            "collective_mismatch",
            (0,),
        ),
        # and the rank that coordinates a barrier is not the one that is absent.
        (
            prefixed(2, waiting("monitored_barrier", error=f"RuntimeError: {CUT_BARRIER}")) + ENDED_1,
            "missing_rank",
            (1,),
        ),
    ],
)  # fmt: skip
def test_the_log_of_a_dead_job_says_who_was_waited_for(tmp_path, log, label, culprits):
    (tmp_path / "job.log").write_text(log)
    assert answer(tmp_path / "job.log") == (label, culprits)


OWN = prefixed(1, traceback("ValueError: label 10", ("load", "/home/u/train.py", 9)))
LOST = prefixed(0, waiting(error=PEER_GONE)) + prefixed(2, waiting(error=PEER_GONE))


@pytest.mark.parametrize(
    ("log", "culprits"),
    [
        (OWN + LOST + report({0: -15, 1: 1, 2: -15}, 1), (1,)),
        (LOST + report({0: 1, 1: -11, 2: 1}, 1), (1,)),
        (OWN + LOST + AGENT + "attempt 1 step 3\ndone\n", (1,)),
        (
            "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-27T22:00:00 DUE TO TIME LIMIT ***\n"
            'Current thread 0x00007f (most recent call first):\n  File "/home/u/train.py", line 4 in work\n'
            '  File "/home/u/train.py", line 9 in <module>\n',
            (),
        ),
    ],
)
def test_a_job_that_ended_otherwise_is_no_hang(tmp_path, log, culprits):
    (tmp_path / "job.log").write_text(log)
    diagnosis = diagnose(read_snapshot([tmp_path / "job.log"]))
    assert (diagnosis.label, diagnosis.confidence, diagnosis.culprit_ranks) == ("unknown", "low", culprits)
    assert diagnosis.summary.startswith("Nothing shows a hang")


def test_tracebacks_of_two_ranks_line_by_line_are_read(tmp_path):
    pairs = zip(TWO_TIME_OUTS.splitlines(True)[:8], TWO_TIME_OUTS.splitlines(True)[8:], strict=True)
    (tmp_path / "job.log").write_text("".join(a + b for a, b in pairs) + DUMP + ENDED_1)
    assert answer(tmp_path / "job.log") == ("external_wait", (1,))


def test_a_log_folder_is_read_as_one_job_and_its_last_attempt_counts(tmp_path):
    first = {0: waiting("broadcast"), 1: waiting(), 2: waiting()}
    second = {0: waiting(), 1: DUMP, 2: waiting()}
    starting = 'Thread 0x1 (most recent call first):\n  File "/torch/distributed/distributed_c10d.py", line 9 in init_process_group\n'
    not_joined = waiting(
        "init_process_group", error="RuntimeError: Gloo connectFullMesh failed with timed out"
    )
    third = {0: not_joined, 1: starting, 2: starting}  # a restart that did not connect says nothing
    for attempt, texts in enumerate((first, second, third)):
        for rank, text in texts.items():
            folder = tmp_path / "none_abc" / f"attempt_{attempt}" / str(rank)
            folder.mkdir(parents=True)
            (folder / "stderr.log").write_text(text)
    (tmp_path / "console.log").write_text(ENDED_1)
    diagnosis = diagnose(read_snapshot([tmp_path]))
    assert (diagnosis.label, diagnosis.culprit_ranks, diagnosis.victim_ranks) == (
        "external_wait",
        (1,),
        (0, 2),
    )
    facts = [(e.ranks, e.fact) for e in diagnosis.evidence]
    assert ("0,2", "waited until a time-out") in facts
    assert ("1", "did not fail, and was ended by the launcher") in facts
    assert ("0", f"failed first: {TIME_OUT}") in facts
    (tmp_path / "console.log").unlink()
    assert not any("failed first" in e.fact for e in diagnose(read_snapshot([tmp_path])).evidence)
    error = '{"message": {"message": "late", "extraInfo": {"timestamp": "%d"}}}'
    for rank in (0, 2):  # by which torchrun decides
        (tmp_path / f"none_abc/attempt_1/{rank}/error.json").write_text(error % (9 - rank))
    assert [e.ranks for e in diagnose(read_snapshot([tmp_path])).evidence if "first" in e.fact] == ["2"]


@pytest.mark.parametrize(
    ("last", "label", "behind"),
    [((4, 5), "collective_mismatch", ["0"]), ((5, 5), "nccl_timeout", []), ((4, 9), "nccl_timeout", [])],
)
def test_steps_in_the_logs_show_who_is_behind(tmp_path, last, label, behind):
    stack = 'Thread 1 (idle): "MainThread"\n    all_reduce (torch/distributed/distributed_c10d.py:3913)\n    <module> (train.py:9)\n'
    for rank, step in enumerate(last):
        lines = "".join(f"[rank{rank}] step {n} loss 0.1\n" for n in range(step - 3, step + 1))
        (tmp_path / f"rank_{rank}.log").write_text(f"gloo://127.0.0.1\n{lines}")
        (tmp_path / f"rank_{rank}.txt").write_text(stack)
    found = diagnose(read_snapshot([tmp_path]))
    assert (found.label, [e.ranks for e in found.evidence if "last logged" in e.fact]) == (label, behind)
    assert not any("NCCL" in step.do or "xid" in step.do for step in found.next_steps)
    for path in tmp_path.glob("*.txt"):
        path.unlink()
    if behind:
        assert "Rank 0 is behind" in diagnose(read_snapshot([tmp_path])).summary


SIGNAL = (
    "[rank{r}]:[E1114 21:17:00.6 ProcessGroupNCCL.cpp:1537] [PG ID 0 PG GUID 0(default_pg) Rank {r}] Received a dump signal due to "
    "a collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: {n}, last completed "
    "NCCL work: 182.\n"
)


def test_a_rank_that_enqueued_less_is_behind(tmp_path):
    (tmp_path / "job.log").write_text(NCCL + SIGNAL.format(r=1, n=182) + SIGNAL.format(r=3, n=184))
    diagnosis = diagnose(read_snapshot([tmp_path / "job.log"]))
    assert (diagnosis.label, diagnosis.culprit_ranks, diagnosis.confidence) == ("missing_rank", (1,), "low")
