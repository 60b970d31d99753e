"""What was not collected is not missing; a launcher, py-spy or a collection may prove it."""

import json

import pytest

from hangdoctor.diagnose import diagnose
from hangdoctor.model import Diagnosis
from hangdoctor.parse.read import read_snapshot
from tests.hangdoctor.analysis.written import collection, entry, flight_recorder, process

C10D = "torch/distributed/distributed_c10d.py"
WAITING = f"""Thread 1 (idle): "MainThread"
    all_reduce ({C10D}:2806)
    step (train.py:60)
    <module> (train.py:90)
"""


def read(tmp_path, files: dict[str, str], world_size: int | None = None) -> Diagnosis:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return diagnose(read_snapshot([tmp_path], world_size))


def test_a_number_of_ranks_does_not_prove_that_the_others_are_gone(tmp_path):
    diagnosis = read(tmp_path, {"paste.txt": f"Ranks 0-6:\n{WAITING}"}, 8)
    assert (diagnosis.label, diagnosis.confidence) == ("nccl_timeout", "low")
    assert "whether rank 7, which was not read, reached it is not known" in diagnosis.summary
    assert [cell.part for cell in diagnosis.ranks] == ["victim"] * 7 + ["not_collected"]
    alone = read(tmp_path, {"paste.txt": f"Rank 0:\n{WAITING}"}, 4)
    assert (alone.label, alone.confidence, alone.culprit_ranks) == ("nccl_timeout", "low", ())
    assert alone.collect[0] == "the stacks of ranks 1-3: areal-debug hang collect --to FOLDER"


def test_a_gap_in_the_numbers_is_no_proof(tmp_path):
    diagnosis = read(tmp_path, {f"rank_{rank}.txt": WAITING for rank in (0, 1, 3)})
    assert diagnosis.label != "missing_rank"
    assert [cell.part for cell in diagnosis.ranks][2] == "not_collected"


ELASTIC = """Root Cause (first observed failure):
[0]:
  time      : 2025-01-02_10:00:00
  host      : node-1
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 77)
"""


@pytest.mark.parametrize(
    "proof",
    [ELASTIC, "srun: error: node-1: task 3: Killed\n", "srun: error: node-1: tasks 3: Out Of Memory\n"],
)
def test_a_report_of_the_launcher_is_a_proof(tmp_path, proof):
    diagnosis = read(tmp_path, {"paste.txt": f"Ranks 0-2:\n{WAITING}", "job.log": proof}, 4)
    assert (diagnosis.label, diagnosis.culprit_ranks) == ("missing_rank", (3,))


def test_a_debug_server_that_got_no_answer_is_a_proof(tmp_path):
    text = f"=== Rank 0: a:1 ===\n{WAITING}=== Rank 1: b:1 ===\nError: 408\n"
    diagnosis = read(tmp_path, {"stacks.txt": text}, 2)
    assert (diagnosis.label, diagnosis.culprit_ranks) == ("missing_rank", (1,))
    assert "did not respond" in diagnosis.summary


@pytest.mark.parametrize(("hosts", "label"), [([], "missing_rank"), (["b"], "nccl_timeout")])
def test_only_a_complete_collection_proves_that_the_other_ranks_are_gone(tmp_path, hosts, label):
    missing = [{"host": host, "status": "unreachable", "detail": ""} for host in hosts]
    contents = collection([process(f"rank_{rank}", rank) for rank in range(3)], hosts=missing)
    files = {f"samples/0/rank_{rank}.txt": WAITING for rank in range(3)}
    assert read(tmp_path, files | {"collection.json": json.dumps(contents)}, 4).label == label


WATCHDOG = (
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL("
    "SeqNum={seq}, OpType={op}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000) ran for 600013 milliseconds\n"
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Exception detected by watchdog "
    "at work: {seq}, last enqueued NCCL work: {enqueued}, last completed NCCL work: 41.\n"
)


def watchdog(rank: int, seq: int = 42, op: str = "ALLREDUCE", size: int = 8, enqueued: int = 42) -> str:
    """Return the two lines of one rank."""
    return WATCHDOG.format(rank=rank, seq=seq, op=op, size=size, enqueued=enqueued)


@pytest.mark.parametrize(
    ("lines", "label", "culprits"),
    [
        ([watchdog(0), watchdog(1), watchdog(2)], "nccl_timeout", ()),
        ([watchdog(0), watchdog(1, op="BROADCAST"), watchdog(2)], "collective_mismatch", (1,)),
        ([watchdog(0), watchdog(1), watchdog(2, size=9)], "collective_mismatch", (2,)),
        ([watchdog(0, seq=44, enqueued=44), watchdog(1), watchdog(2, seq=44, enqueued=44)], "unknown", (1,)),
    ],
)
def test_the_tail_of_a_log_with_messages_of_the_watchdog_is_enough(tmp_path, lines, label, culprits):
    diagnosis = read(tmp_path, {"train.log": "".join(lines)})
    assert (diagnosis.label, diagnosis.culprit_ranks) == (label, culprits), diagnosis.summary
    assert any("watchdog" in evidence.fact.lower() for evidence in diagnosis.evidence) or label == "unknown"


def test_watchdogs_that_cannot_be_compared_accuse_nobody(tmp_path):
    # Rank 1 has enqueued as much as the others: it is late in what they have completed.
    lines = [watchdog(0, seq=44, enqueued=44), watchdog(1, enqueued=50)]
    (tmp_path / "train.log").write_text("".join(lines) + WAITING)
    assert read_snapshot([tmp_path]).records == ()


NATIVE = """Thread 1 (idle): "MainThread"
    {native}
    all_reduce ({c10d}:2806)
    step (train.py:60)
    <module> (train.py:90)
"""


def native(function: str) -> str:
    """Return a stack whose innermost frame is native."""
    return NATIVE.format(native=function, c10d=C10D)


@pytest.mark.parametrize(
    ("files", "kind", "culprits"),
    [
        ({"rank_0.txt": native("cuLibraryLoadData (libcuda.so.1)"), "rank_1.txt": WAITING}, "stuck_in_launch", (0,)),
        ({f"rank_{r}.txt": native("gloo::transport::tcp::UnboundBuffer::waitRecv(int*) (libtorch_cpu.so)") for r in (0, 1)},
            "transport", ()),
        ({"rank_0.txt": WAITING, "rank_1.txt": WAITING, "rank_1.log": "NCCL WARN NET/IB : Got completion with status=12\n"},
            "transport", ()),
        ({"rank_0.txt": WAITING, "rank_1.txt": WAITING, "rank_1.log": "NVRM: Xid (PCI:0000:3b:00): 79, fallen off the bus\n"},
            "device", (1,)),
        ({"rank_0.txt": WAITING, "rank_1.txt": WAITING}, "", ()),
    ],
)  # fmt: skip
def test_the_kind_of_a_collective_that_does_not_end(tmp_path, files, kind, culprits):
    diagnosis = read(tmp_path, files)
    assert (diagnosis.label, diagnosis.kind, diagnosis.culprit_ranks) == ("nccl_timeout", kind, culprits)


@pytest.mark.parametrize(
    ("states", "kind", "culprits"),
    [
        (("started", "started"), "transport", ()),
        (("started", "scheduled"), "stuck_in_launch", (1,)),
        (("scheduled", "scheduled"), "", ()),
    ],
)
def test_the_kind_by_the_states_of_records(tmp_path, states, kind, culprits):
    files = {}
    for rank, state in enumerate(states):
        recorded = flight_recorder([entry(7, done=False, state=state)], "[0, 1]")
        files[f"nccl_trace_rank_{rank}.json"] = json.dumps(recorded)
    diagnosis = read(tmp_path, files)
    assert (diagnosis.label, diagnosis.kind, diagnosis.culprit_ranks) == ("nccl_timeout", kind, culprits)
