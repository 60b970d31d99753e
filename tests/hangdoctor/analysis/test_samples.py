"""Collections with several samples and /proc facts: what moved, what slept, who is gone."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from areal_debug.hang.tree import exit_status
from hangdoctor.diagnose import diagnose, unsettled
from hangdoctor.parse.read import read_snapshot
from tests.hangdoctor.analysis import written

C10D = "torch/distributed/distributed_c10d.py"
MODULE = "<module> train.py 90"
REDUCE = [f"all_reduce {C10D} 2806", "step train.py 60", MODULE]
BARRIER = [f"barrier {C10D} 4581", "step train.py 66", MODULE]
DESTROY = [f"destroy_process_group {C10D} 2146", "main train.py 80", MODULE]
LOADING = [
    "_try_get_data torch/utils/data/dataloader.py 1131",
    "__next__ torch/utils/data/dataloader.py 631",
    MODULE,
]
COMPUTE = ["matmul model.py 12", "forward model.py 30", MODULE]
SAVING = ["_save torch/serialization.py 1200", "save_checkpoint train.py 70", MODULE]
PLAIN = ["flush metrics.py 30", "step train.py 58", MODULE]
ASLEEP = {
    "state": "S",
    "wchan": "futex_do_wait",
    "cpu_s": 3.0,
    "voluntary_switches": 50,
    "involuntary_switches": 7,
}
WRITING = ASLEEP | {"state": "D", "wchan": "submit_bio_wait"}


@dataclass
class Process:
    """A process of a collection: a stack and /proc per sample.

    A thread is a list of `function file line` texts, innermost first.
    """

    stacks: list[list[str]]
    facts: list[dict] = field(default_factory=lambda: [ASLEEP, ASLEEP])
    rank: int | None = None
    role: str = "trainer"
    parent: str | None = None
    status: str = "dumped"
    threads: list[list[str]] = field(default_factory=list)
    gil: bool = False
    active: bool = False


def write(
    folder: Path, processes: dict[str, Process], seconds: float = 3.0, source: dict[str, str] | None = None
) -> Path:
    """Write the collection of these processes to `folder`."""
    entries = []
    for name, p in processes.items():
        rank = p.rank if p.rank is not None or p.parent else int(name.rsplit("_", 1)[-1])
        entries.append(written.process(name, rank, role=p.role, parent=p.parent, status=p.status))
    times = [{"time": 100.0}, {"time": 100.0 + seconds}]
    size = sum(p.parent is None for p in processes.values())
    put(folder / "collection.json", written.collection(entries, world_size=size, samples=times))
    for name, process in processes.items():
        for sample, stack in enumerate(process.stacks):
            threads = [thread("MainThread", stack, process.gil, process.active)]
            threads += [thread(f"t{i}", other, False, False) for i, other in enumerate(process.threads)]
            put(folder / f"samples/{sample}/{name}.json", threads[::-1])
            put(folder / f"proc/{sample}/{name}.json", process.facts[sample])
        put(folder / f"source/{name}.json", source or {})
    return folder


def put(path: Path, document: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def thread(name: str, stack: list[str], gil: bool, active: bool) -> dict:
    parts = [text.split() for text in stack]
    frames = [written.frame(function, file, int(line)) for function, file, line in parts]
    return written.thread(frames, name=name, active=active, gil=gil)


def still(stack: list[str], **more) -> Process:
    return Process([stack, stack], **more)


def judged(folder: Path, processes: dict[str, Process], **more):
    return diagnose(read_snapshot([write(folder, processes, **more)]))


def ran(switches: int, cpu_s: float = 0.0, state: str = "S") -> list[dict]:
    return [ASLEEP, ASLEEP | {"voluntary_switches": 50 + switches, "cpu_s": 3.0 + cpu_s, "state": state}]


SLOW = still(COMPUTE, facts=ran(0, cpu_s=2.9, state="R"), active=True)
STOPPED = still(COMPUTE, facts=[ASLEEP | {"state": "T"}] * 2, status="stopped")
TWO_WRITES = [WRITING, WRITING]
# Ranks, seconds between the samples, label, confidence, culprits, victims.
JUDGED = {
    "what no sample contradicts": (
        [still(REDUCE), still(DESTROY), still(REDUCE)], 3, "cleanup_deadlock", "high", (1,), (0, 2)
    ),
    "ranks that all moved": (
        [Process([REDUCE, COMPUTE]), Process([COMPUTE, LOADING])], 3, "straggler_or_not_hung", "high", (), ()
    ),
    "one computes": ([still(REDUCE), SLOW, still(REDUCE)], 3, "straggler_or_not_hung", "medium", (1,), (0, 2)),
    "slow writing of a checkpoint": (
        [still(SAVING, facts=ran(200), gil=True), still(BARRIER)], 3, "straggler_or_not_hung", "medium", (0,), (1,)
    ),
    **{
        f"one switch beside {name}": (
            [still(SAVING, facts=[before, after | {"voluntary_switches": 51}]), still(BARRIER)],
            3, "straggler_or_not_hung", "medium", (0,), (1,),
        )
        for name, before, after in (
            ("two writes", WRITING, WRITING), ("a write that ended", WRITING, ASLEEP), ("one that began", ASLEEP, WRITING)
        )
    },
    **{
        f"one write for {seconds} s": (
            [still(SAVING, facts=TWO_WRITES), still(BARRIER)], seconds, "checkpoint_stall", confidence, (0,), (1,)
        )
        for seconds, confidence in ((1, "low"), (3, "medium"), (30, "high"))
    },
    **{
        f"a wait that a healthy step knows, for {seconds} s": (
            [still(LOADING), still(REDUCE), still(REDUCE)], seconds, "dataloader_stall", confidence, (0,), (1, 2)
        )
        for seconds, confidence in ((3, "medium"), (30, "high"))
    },
    "a sleeping owner of the GIL": (
        [still(REDUCE), still(PLAIN, gil=True)], 3, "lock_deadlock", "high", (1,), (0,)
    ),
    "a stopped rank": ([still(REDUCE), STOPPED], 3, "missing_rank", "high", (1,), (0,)),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGED)
def test_what_two_samples_show(tmp_path, name):
    ranks, seconds, *expected = JUDGED[name]
    found = judged(tmp_path, {f"rank_{rank}": one for rank, one in enumerate(ranks)}, seconds=seconds)
    assert [found.label, found.confidence, found.culprit_ranks, found.victim_ranks] == expected
    parts = {
        part: tuple(cell.rank for cell in found.ranks if cell.part == part) for part in ("culprit", "victim")
    }
    assert [parts["culprit"], parts["victim"]] == expected[2:]


def test_ranks_at_the_same_line_that_the_kernel_woke_are_stepping(tmp_path):
    woken = {f"rank_{rank}": still(REDUCE, facts=ran(21)) for rank in range(3)}
    diagnosis = judged(tmp_path, woken | {"rank_3": still(DESTROY)})
    assert diagnosis.label == "straggler_or_not_hung" or diagnosis.confidence == "low"


def test_a_rank_that_is_gone_is_missing_and_its_last_words_are_shown(tmp_path):
    folder = write(tmp_path, {"rank_0": still(REDUCE), "rank_1": Process([], status="gone")})
    put(
        folder / "errors/rank_1.json",
        {"message": {"message": "OutOfMemoryError: 40 GiB", "extraInfo": {"timestamp": "99"}}},
    )
    (folder / "logs").mkdir()
    (folder / "logs/rank_1.log").write_text("step 4\nKilled\n")
    diagnosis = diagnose(read_snapshot([folder]))
    assert (diagnosis.label, diagnosis.confidence, diagnosis.culprit_ranks) == ("missing_rank", "high", (1,))
    facts = " ".join(evidence.fact for evidence in diagnosis.evidence)
    assert "OutOfMemoryError: 40 GiB" in facts
    assert "Killed" in facts


def test_a_rank_that_could_not_be_read_is_no_certain_culprit(tmp_path):
    diagnosis = judged(tmp_path, {"rank_0": still(REDUCE), "rank_1": Process([], status="not_permitted")})
    assert (diagnosis.label, diagnosis.confidence) == ("missing_rank", "low")
    assert any("ptrace_scope" in step.do for step in diagnosis.next_steps)


@pytest.mark.parametrize(
    ("line", "wchan", "label"),
    [
        ("with self.lock:", None, "lock_deadlock"),
        ("fcntl.flock(handle, fcntl.LOCK_EX)", None, "lock_deadlock"),
        ("time.sleep(60)", None, "partial_exception"),
        ("payload = connection.recv(4096)", None, "external_wait"),
        ("dist.destroy_process_group()", None, "cleanup_deadlock"),
        ("work.wait()", None, "collective_mismatch"),
        (None, "hrtimer_nanosleep", "partial_exception"),
        (None, "do_wait", "external_wait"),
        (None, "pipe_read", "external_wait"),
        (None, "locks_lock_inode_wait", "lock_deadlock"),
    ],
)
def test_the_text_of_a_line_or_the_kernel_says_what_a_call_into_c_waits_for(tmp_path, line, wchan, label):
    facts = [ASLEEP | ({"wchan": wchan} if wchan else {})] * 2
    processes = {"rank_0": still(REDUCE), "rank_1": still(PLAIN, facts=facts), "rank_2": still(REDUCE)}
    diagnosis = judged(tmp_path, processes, source={"metrics.py:30": line} if line else None)
    assert (diagnosis.label, diagnosis.culprit_ranks) == (label, (1,))


def test_an_engine_that_hangs_by_itself_makes_the_waiting_trainer_a_victim(tmp_path):
    http = ["urlopen urllib3/connectionpool.py 790", "generate rollout.py 33", MODULE]
    loop = ["event_loop_normal sglang/srt/managers/scheduler.py 700", "<module> <string> 1"]
    forward = [f"all_reduce {C10D} 2806", "forward sglang/srt/models/llama.py 30", *loop]
    processes = {"rank_0": still(http), "rank_1": still(REDUCE)}
    processes |= {f"engine_rank_{i}": still(forward, role="engine", rank=i) for i in (0, 1, 3)}
    failed = ["idle_after_failure serve.py 20", *loop]
    processes["engine_rank_2"] = still(failed, role="engine", rank=2)
    folder = write(tmp_path, processes)
    contents = json.loads((folder / "collection.json").read_text())
    put(folder / "collection.json", contents | {"world_size": 2})
    diagnosis = diagnose(read_snapshot([folder]))
    assert (diagnosis.label, diagnosis.culprit_ranks) == ("partial_exception", ("engine_rank_2",))
    assert set(diagnosis.victim_ranks) >= {0, 1}


IMPORTING = ["_find_and_load importlib/_bootstrap.py 1176", MODULE]
LATE_IMPORT = ["_find_and_load importlib/_bootstrap.py 1180", MODULE]


def test_ranks_that_came_from_their_start_to_a_wait_have_not_moved(tmp_path):
    arrived = {
        r: Process([IMPORTING, BARRIER if r == "rank_1" else REDUCE]) for r in ("rank_0", "rank_1", "rank_2")
    }
    diagnosis = judged(tmp_path, arrived)
    assert (diagnosis.label, diagnosis.confidence, diagnosis.culprit_ranks) == (
        "collective_mismatch",
        "low",
        (1,),
    )
    assert unsettled(read_snapshot([tmp_path]))


def test_what_moved_before_the_last_two_samples_may_have_hung_since(tmp_path):
    facts = [ASLEEP, ASLEEP, ASLEEP]
    ranks = {f"rank_{r}": Process([COMPUTE, REDUCE, REDUCE], facts) for r in (0, 2)}
    write(tmp_path, ranks | {"rank_1": Process([COMPUTE, BARRIER, BARRIER], facts)})
    contents = json.loads((tmp_path / "collection.json").read_text())
    put(tmp_path / "collection.json", contents | {"samples": [{"time": t} for t in (1, 4, 7)]})
    diagnosis = diagnose(read_snapshot([tmp_path]))
    assert (diagnosis.label, diagnosis.confidence) == ("collective_mismatch", "high")
    assert not unsettled(read_snapshot([tmp_path]))


def test_a_job_that_imports_is_starting(tmp_path):
    diagnosis = judged(
        tmp_path, {f"rank_{r}": Process([IMPORTING, LATE_IMPORT], ran(80, 2.0)) for r in (0, 1)}
    )
    assert (diagnosis.label, diagnosis.kind, exit_status(diagnosis)) == (
        "straggler_or_not_hung",
        "starting",
        2,
    )
    assert diagnosis.summary.startswith("The job is starting: ranks 0-1 import or load")
