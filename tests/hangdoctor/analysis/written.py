"""What tools write into a collection: stacks of py-spy, records of Flight Recorder, the list of processes."""

from typing import Any


def frame(function: str, file: str = "/v/site-packages/torch/x.py", line: int = 3) -> dict[str, Any]:
    short = file.rpartition("site-packages/")[2]
    return {
        "name": function, "filename": file, "module": None, "short_filename": short, "line": line, "locals": None,
    }  # fmt: skip


def thread(
    frames: list[dict[str, Any]],
    pid: int = 10,
    os_id: int | None = 11,
    name: str | None = "MainThread",
    *,
    active: bool = False,
    gil: bool = False,
) -> dict[str, Any]:
    """Return a thread as `py-spy dump --json` has it."""
    return {
        "pid": pid, "thread_id": 1, "thread_name": name, "os_thread_id": os_id, "active": active, "owns_gil": gil,
        "frames": frames,
    }  # fmt: skip


def entry(
    sequence: int, operation: str = "all_reduce", done: bool = True, size: int = 8, **changes: object
) -> dict[str, Any]:
    return {
        "record_id": sequence, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": sequence,
        "p2p_seq_id": 0, "op_id": sequence, "profiling_name": f"nccl:{operation}", "time_created_ns": 10**18 + sequence,
        "input_sizes": [[size]], "input_dtypes": ["Float"], "output_sizes": [[size]], "output_dtypes": ["Float"],
        "state": "completed" if done else "scheduled", "retired": done, "timeout_ms": 600000, "is_p2p": False,
        "frames": [{"name": "all_reduce", "filename": "distributed_c10d.py", "line": 3}],
    } | changes  # fmt: skip


def flight_recorder(entries: list[dict[str, Any]], ranks: str = "[0, 1, 2]") -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}


def process(name: str, rank: int | None, **changes: object) -> dict[str, Any]:
    usual = {
        "role": "trainer",
        "host": "a",
        "pid": 10,
        "parent": None,
        "status": "dumped",
        "detail": "",
        "command": "",
    }
    return {"name": name, "rank": rank} | usual | changes


def collection(processes: list[dict[str, Any]], **changes: object) -> dict[str, Any]:
    whole = {"format": "hangdoctor-collection", "version": 1, "world_size": None, "hosts": []}
    return whole | {"samples": [{"time": 5.0}], "processes": processes} | changes
