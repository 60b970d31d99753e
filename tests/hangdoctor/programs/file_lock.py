"""Rank 0 waits for the lock file of a shared cache, held by another process; peers in a barrier.

label: lock_deadlock
culprits: 0
ranks: 2
"""

import fcntl
import subprocess
import tempfile
from pathlib import Path

import torch.distributed as dist
from hang_point import here


def read_cache(lock_path: Path) -> None:
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    lock_path = Path(tempfile.mkdtemp(), "cache.lock")
    holder = lock_path.open("w")
    fcntl.flock(holder, fcntl.LOCK_EX)
    subprocess.Popen(["sleep", "3600"], pass_fds=[holder.fileno()])
    holder.close()
    here()
    read_cache(lock_path)
here()
dist.barrier()
