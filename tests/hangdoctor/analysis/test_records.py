"""Records of Flight Recorder, RAS and the watchdog, and their weight against the stacks."""

import json
import os
import pickle
from pathlib import Path

import pytest

from hangdoctor.diagnose import diagnose
from hangdoctor.errors import UnreadableDump
from hangdoctor.parse.flight_recorder import parse_flight_recorder
from hangdoctor.parse.plain_pickle import load_plain
from hangdoctor.parse.read import read_snapshot
from tests.forks import run_forked
from tests.hangdoctor.analysis.written import entry, flight_recorder

WAITING = """Process {pid}: python train.py
Python v3.11.7

Thread {pid} (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2806)
    step (train.py:60)
    <module> (train.py:90)
"""
LOADING = """Process {pid}: python train.py
Python v3.11.7

Thread {pid} (idle): "MainThread"
    wait (threading.py:324)
    _try_get_data (torch/utils/data/dataloader.py:1131)
    __next__ (torch/utils/data/dataloader.py:631)
    <module> (train.py:90)
"""


def dump(entries: list[dict]) -> bytes:
    return pickle.dumps(flight_recorder(entries), protocol=2)


def write(folder: Path, records: dict[int, list[dict]], stacks: dict[int, str]) -> Path:
    for rank, entries in records.items():
        (folder / f"nccl_trace_rank_{rank}").write_bytes(dump(entries))
    for rank, text in stacks.items():
        (folder / f"rank_{rank}.txt").write_text(text.format(pid=100 + rank))
    return folder


def test_json_and_pickle_of_a_dump_give_the_same_records():
    document = pickle.loads(dump([entry(1), entry(2, done=False)]))
    assert parse_flight_recorder(json.dumps(document).encode(), 0) == parse_flight_recorder(
        dump([entry(1), entry(2, done=False)]), 0
    )


def test_send_has_a_number_of_its_own():
    sent = entry(1, "send 0->3", is_p2p=True, p2p_seq_id=5)
    (record,) = parse_flight_recorder(dump([sent]), 0)
    assert (record.operation, record.sequence, record.is_p2p) == ("send", 5, True)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path, protocol):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    with pytest.raises(UnreadableDump):
        parse_flight_recorder(pickle.dumps({"version": "1", "entries": [Evil()]}, protocol=protocol), 0)
    assert not (tmp_path / "ran").exists()


def test_other_operation_at_the_same_number_is_a_mismatch_with_high_confidence(tmp_path):
    records = {
        rank: [entry(1), entry(2, "broadcast" if rank == 2 else "all_reduce", done=False)]
        for rank in range(4)
    }
    diagnosis = diagnose(read_snapshot([write(tmp_path, records, {})]))
    assert (diagnosis.label, diagnosis.confidence, diagnosis.culprit_ranks) == (
        "collective_mismatch",
        "high",
        (2,),
    )
    assert diagnosis.summary == (
        "Rank 2 and ranks 0-1,3 disagree on the operation of collective 2 of group 0:default_pg: "
        "broadcast where the others have all_reduce."
    )


def behind(rank: int | None, num_ranks: int) -> dict[int, list[dict]]:
    """Return the records of ranks of which one has not begun the second collective."""
    both = [entry(1), entry(2, done=False)]
    return {one: both[:1] if one == rank else both for one in range(num_ranks)}


def test_records_alone_name_who_is_behind_but_not_why(tmp_path):
    diagnosis = diagnose(read_snapshot([write(tmp_path, behind(1, 4), {})]))
    assert (diagnosis.label, diagnosis.confidence, diagnosis.culprit_ranks) == ("unknown", "low", (1,))
    assert "stacks" in diagnosis.collect[0]


@pytest.mark.parametrize(("late", "confidence"), [(1, "high"), (0, "low")])
def test_records_make_one_sample_certain_or_contradict_it(tmp_path, late, confidence):
    stacks = {rank: LOADING if rank == 1 else WAITING for rank in range(3)}
    diagnosis = diagnose(read_snapshot([write(tmp_path, behind(late, 3), stacks)]))
    assert (diagnosis.label, diagnosis.confidence) == ("dataloader_stall", confidence)
    if confidence == "high":
        assert diagnosis.culprit_ranks == (1,)
    else:
        assert any(evidence.fact.startswith("contradicts the stacks") for evidence in diagnosis.evidence)


def test_equal_records_beside_equal_stacks_point_at_the_network(tmp_path):
    stacks = dict.fromkeys(range(4), WAITING)
    diagnosis = diagnose(read_snapshot([write(tmp_path, behind(None, 4), stacks)], 4))
    assert (diagnosis.label, diagnosis.confidence, diagnosis.culprit_ranks) == ("nccl_timeout", "medium", ())


def test_ras_json_names_missing_ranks(tmp_path):
    report = {
        "communicators": [
            {
                "hash": "ab",
                "ranks": [{"rank": 0, "collective_operation_counts": {"AllReduce": 5}}],
                "missing_ranks": [{"rank": 1}],
            }
        ]
    }
    (tmp_path / "ras.json").write_text(json.dumps(report))
    snapshot = read_snapshot([tmp_path])
    assert [(r.rank, r.operations, r.status) for r in snapshot.ras] == [
        (1, None, "MISSING"),
        (0, 5, "RUNNING"),
    ]


RECORDING = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4, 5))
dist.barrier()
from torch._C import _distributed_c10d as c10d
open(sys.argv[1], "wb").write(c10d._dump_fr_trace())
"""


@pytest.mark.long
def test_what_torch_itself_writes_is_read(tmp_path):
    path, program = tmp_path / "trace_rank_0", tmp_path / "recording.py"
    program.write_text(RECORDING)
    done = run_forked([str(program), str(path)], os.environ | {"TORCH_FR_BUFFER_SIZE": "100"})
    assert done.returncode == 0, done.stderr
    assert load_plain(path.read_bytes()) == pickle.loads(path.read_bytes())
    reduced, barrier = parse_flight_recorder(path.read_bytes(), 0)
    assert (reduced.operation, reduced.sequence, reduced.input_sizes, reduced.state) == (
        "all_reduce",
        1,
        ((4, 5),),
        "completed",
    )
    assert (barrier.operation, barrier.sequence, barrier.rank) == ("barrier", 2, 0)
