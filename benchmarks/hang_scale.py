"""Time of a diagnosis for 1,000, 10,000 and 100,000 ranks, and compared with torchfrtrace.

    python -m benchmarks.hang_scale [--ranks 1000 10000 100000] [--frtrace 64 512]

Each job is a tar of py-spy JSON, two samples per rank, twelve threads and about 90 frames each,
with different process and thread ids; a few ranks are in the data loader while the others wait in
an all_reduce. Reading and diagnosing run in a separate process, whose peak memory is reported.
torchfrtrace reads the same Flight Recorder pickles that we read.
"""

import contextlib
import importlib.util
import io
import json
import pickle
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from benchmarks.harness import read_options, report

GOALS_S = {1_000: 1.0, 10_000: 5.0, 100_000: 10.0}
FIRST_THREAD_ID = 140 * 10**12  # an address on 64-bit Linux: 15 digits
DIAGNOSE = """
import json, resource, sys, time
from pathlib import Path
from hangdoctor.diagnose import diagnose
from hangdoctor.parse.read import read_snapshot
started, cpu_started = time.perf_counter(), time.process_time()
diagnosis = diagnose(read_snapshot([Path(sys.argv[1])]))
seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
found = [diagnosis.label, len(diagnosis.culprit_ranks), len(diagnosis.victim_ranks)]
print(json.dumps([seconds, cpu_s, peak_mib, *found]))
"""


def frames(names: list[tuple[str, str, int]]) -> list[dict]:
    return [
        {"name": name, "filename": f"/opt/venv/lib/python3.11/site-packages/{file}" if "/" in file else f"/job/{file}",
         "module": None, "short_filename": file, "line": line, "locals": None, "is_entry": False, "is_shim_entry": False}
        for name, file, line in names
    ]  # fmt: skip


def threads_of(rank: int, culprit: bool, random_: random.Random) -> list[dict]:
    """Return py-spy's output for one rank: main, pin-memory, pool and unnamed autograd threads."""
    step = [("train", "train.py", 210), ("main", "train.py", 300), ("<module>", "train.py", 310)]
    wait = [
        ("all_reduce", "torch/distributed/distributed_c10d.py", 3906),
        ("clip_gradients", "train.py", 88),
        ("optimizer_step", "train.py", 140),
    ]
    data = [("wait", "threading.py", 331), ("get", "queue.py", 180),
            ("_try_get_data", "torch/utils/data/dataloader.py", 1251), ("_get_data", "torch/utils/data/dataloader.py", 1412),
            ("__next__", "torch/utils/data/dataloader.py", 733)]  # fmt: skip
    pool = [("wait", "threading.py", 327), ("get", "queue.py", 171), ("_worker", "concurrent/futures/thread.py", 81),
            ("run", "threading.py", 982), ("_bootstrap_inner", "threading.py", 1045), ("_bootstrap", "threading.py", 1002)]  # fmt: skip
    autograd = [("backward", "torch/autograd/function.py", 307)] * 3
    stacks = (
        [("MainThread", (data if culprit else wait) + step)]
        + [(f"pool_{i}", pool) for i in range(9)]
        + [(None, autograd)] * 2
    )
    pid = 4000 + rank * 40 + random_.randrange(30)
    return [
        {"pid": pid, "thread_id": FIRST_THREAD_ID + random_.randrange(10**12), "thread_name": name, "os_thread_id": pid + number,
         "active": False, "owns_gil": False, "frames": frames(stack), "process_info": None}
        for number, (name, stack) in enumerate(stacks)
    ]  # fmt: skip


def write_job(path: Path, num_ranks: int) -> int:
    """Write one collection as a tar; return its size in bytes."""
    random_ = random.Random(num_ranks)
    culprits = set(random_.sample(range(num_ranks), 3))
    with tarfile.open(path, "w") as tar:
        entries = [
            {"name": f"rank_{r}", "rank": r, "role": "trainer", "host": f"node-{r // 8}", "pid": 4000 + r,
                "parent": None, "status": "dumped", "detail": "", "command": ""}
            for r in range(num_ranks)
        ]  # fmt: skip
        contents = {
            "format": "hangdoctor-collection",
            "version": 1,
            "world_size": num_ranks,
            "hosts": [],
            "samples": [{"time": 0.0}, {"time": 3.0}],
            "processes": entries,
        }
        add(tar, "collection.json", json.dumps(contents).encode())
        for rank in range(num_ranks):
            document = json.dumps(threads_of(rank, rank in culprits, random_), indent=2).encode()
            for sample in range(2):
                add(tar, f"samples/{sample}/rank_{rank}.json", document)
    return path.stat().st_size


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def measure_scale(num_ranks: int, folder: Path) -> None:
    path = folder / f"job_{num_ranks}.tar"
    size = write_job(path, num_ranks)
    done = subprocess.run(
        [sys.executable, "-c", DIAGNOSE, str(path)], capture_output=True, text=True, check=True
    )
    path.unlink()
    seconds, cpu_s, peak_mib, label, culprits, victims = json.loads(done.stdout)
    goal = GOALS_S.get(num_ranks)
    ratio = f", {seconds / goal:.2f} of the goal of {goal:g} s" if goal else ""
    print(
        f"{num_ranks:>7} ranks, {size / 2**20:,.0f} MiB: {seconds:.2f} s{ratio}, {cpu_s:.2f} s of CPU, peak {peak_mib:,.0f} MiB; "
        f"{label}, {culprits} culprits, {victims} victims",
        flush=True,
    )


def flight_recorder_dump(rank: int, num_ranks: int, num_entries: int) -> bytes:
    """Return torch's dump for one rank; the last rank is one collective behind."""
    entries = [
        {"record_id": i, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": i + 1, "p2p_seq_id": 0, "op_id": i + 1,
         "profiling_name": "nccl:all_reduce", "time_created_ns": 10**18 + i * 10**6, "input_sizes": [[1024, 1024]],
             "input_dtypes": ["Float"],
         "output_sizes": [[1024, 1024]], "output_dtypes": ["Float"], "state": "completed" if i + 2 < num_entries else "scheduled",
         "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "retired": i + 2 < num_entries, "timeout_ms": 600000,
         "is_p2p": False, "frames": [{"name": "all_reduce", "filename": "distributed_c10d.py", "line": 3906},
             {"name": "main", "filename": "train.py", "line": 88}]}
        for i in range(num_entries - (rank == num_ranks - 1))
    ]  # fmt: skip
    ranks = json.dumps(list(range(num_ranks)))
    return pickle.dumps(
        {
            "version": "2.10",
            "comm_lib_version": "2.28",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
            "pg_status": {},
            "entries": entries,
        },
        protocol=2,
    )


def measure_frtrace(num_ranks: int, folder: Path) -> None:
    """Time both readers on the same dumps, each in a new process, with the interpreter's start."""
    dumps = folder / f"fr_{num_ranks}"
    dumps.mkdir()
    for rank in range(num_ranks):
        (dumps / f"nccl_trace_rank_{rank}").write_bytes(flight_recorder_dump(rank, num_ranks, 200))
    module = "torch.distributed.flight_recorder.fr_trace"
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: no comparison with torchfrtrace")
        return
    started = time.perf_counter()
    theirs = subprocess.run(
        [sys.executable, "-m", module, str(dumps), "-p", "nccl_trace_rank_"],
        capture_output=True,
        text=True,
        check=False,
    )
    theirs_s = time.perf_counter() - started
    started = time.perf_counter()
    ours = subprocess.run(
        [sys.executable, "-c", DIAGNOSE, str(dumps)], capture_output=True, text=True, check=True
    )
    ours_s = time.perf_counter() - started
    named = "names" if f"{num_ranks - 1}" in theirs.stdout + theirs.stderr else "does not name"
    print(
        f"Flight Recorder of {num_ranks} ranks x 200: ours {ours_s:.2f} s ({json.loads(ours.stdout)[3]}), "
        f"torchfrtrace {theirs_s:.2f} s (rc {theirs.returncode}, {named} the rank behind), "
        f"ratio {theirs_s / ours_s:.1f}",
        flush=True,
    )
    what = f"diagnosis of Flight Recorder dumps of {num_ranks} ranks"
    report(what, "torchfrtrace", "s", [ours_s], [theirs_s])


def main() -> None:
    options = read_options(__doc__, ranks=[1_000, 10_000, 100_000], frtrace=[64, 512])
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(KeyboardInterrupt):
        for num_ranks in options.ranks:
            measure_scale(num_ranks, Path(name))
        for num_ranks in options.frtrace:
            measure_frtrace(num_ranks, Path(name))


if __name__ == "__main__":
    main()
