"""torchrun that exits with the code of the first rank that failed, and shows its last output.

Run as `python -m areal_core.launch.node --nproc-per-node 2 script.py ...`, once a node. torchrun
itself always exits with 1, which would hide that a rank exited with 2 (misuse) or was killed. Where
several nodes end each other, as under SLURM, the codes of the agents are inconclusive: each writes
a `Failure` next to the logs of its ranks, and the earliest one is the cause.

AREAL_RANK_LOGS/node-0/failure.json                          the first rank of that node that failed, if one did
AREAL_RANK_LOGS/node-0/RUN/attempt_0/LOCAL_RANK/stderr.log   the standard error of a rank, which is also shown
"""

import json
import os
import select
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.safety.durable import commit_file, disk_errors_as_warnings

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

RANK_LOGS = "AREAL_RANK_LOGS"
POLL_S = 0.1


@dataclass(frozen=True)
class Failure:
    """The first rank that failed on a node, its Unix time, and its exit code as in a shell."""

    time_s: float
    rank: int
    exit_code: int


def main() -> None:
    """Run torchrun with the arguments of this process; exit with the code of the first failure."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if "SLURM_PROCID" in os.environ:  # under srun there is one agent, and one task, per node
        os.environ.setdefault("PET_NODE_RANK", os.environ["SLURM_PROCID"])
    logs = Path(os.environ[RANK_LOGS]) / f"node-{os.environ.get('PET_NODE_RANK', '0')}"
    # The prefix of an empty role is empty: lines look as the rank wrote them. Torch 2.13 has only a
    # variable for it.
    os.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "${role_name}"
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # as torchrun starts a script, but not a command
    options = ["--log-dir", str(logs), "--tee", "2", "--role", ""]
    ends: dict[int, float] = {}
    threading.Thread(target=note_ends, args=(ends,), daemon=True).start()
    try:
        run.main([*options, *sys.argv[1:]])
    except SignalException as ended:
        sys.exit(128 + ended.sigval)
    except ChildFailedError as error:
        failure = first_failure(error, ends)
        with disk_errors_as_warnings("the job's exit code may be that of another node"):
            commit_file(logs / "failure.json", json.dumps(asdict(failure)))
        print(describe(failure, logs, error.failures[failure.rank].local_rank), file=sys.stderr)
        sys.exit(failure.exit_code)


def note_ends(ends: dict[int, float]) -> None:
    """Record indefinitely when children of the main thread end (process id -> Unix time in s).

    torchrun polls every 0.1 s. By then the failure of a killed rank has spread to others, whose
    connections are closed.
    """
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if not children.exists():  # not Linux: rely on torchrun's own order
        return
    watched: set[int] = set()
    descriptors: dict[int, int] = {}
    running = select.poll()
    while True:
        for pid in {int(pid) for pid in children.read_text().split()} - watched:
            watched.add(pid)
            with suppress(ProcessLookupError):  # it has just ended
                descriptor = os.pidfd_open(pid)
                descriptors[descriptor] = pid
                running.register(descriptor, select.POLLIN)
        ended, now = running.poll(POLL_S * 1000), time.time()
        for descriptor, _ in ended:
            ends[descriptors.pop(descriptor)] = now
            running.unregister(descriptor)
            os.close(descriptor)


def first_failure(error: "ChildFailedError", ends: dict[int, float]) -> Failure:
    """Return the earliest failure. An end that was not noted counts as that seen before it by torchrun."""
    times, seen = {}, 0.0
    for rank, one in error.failures.items():  # in the order in which torchrun saw them
        times[rank] = seen = ends.get(one.pid, seen)
    rank, first = min(error.failures.items(), key=lambda item: times[item[0]])
    code = first.exitcode if first.exitcode > 0 else 128 - first.exitcode  # negative: a signal
    return Failure(ends.get(first.pid, first.timestamp), rank, code)


def describe(failure: Failure, logs: Path, local_rank: int) -> str:
    """Describe the rank that failed first, with the last lines of its standard error."""
    from areal_core.servers.server import last_lines

    # deterministic: one file
    files = logs.glob(f"*/attempt_0/{local_rank}/stderr.log")
    written = "".join(last_lines(file, num_lines=20) for file in files)
    first = f"rank {failure.rank} failed first, with exit code {failure.exit_code}"
    return f"{first}; the last lines of its standard error:\n{written}" if written else first


def earliest_failure(rank_logs: Path) -> Failure | None:
    """Return the earliest failure on any node; None without one."""
    failures = [Failure(**json.loads(file.read_text())) for file in rank_logs.glob("node-*/failure.json")]
    return min(failures, key=lambda failure: failure.time_s, default=None)


if __name__ == "__main__":
    main()
