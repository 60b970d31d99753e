"""Rank 1 was killed; rank 0 waits in the store for its message that the checkpoint is read.

label: missing_rank
culprits: 1
ranks: 2
"""

import os
import signal
from datetime import timedelta

import torch.distributed as dist
from hang_point import meet


def wait_until_all_have_read(store: dist.Store, rank: int, world_size: int) -> None:
    store.set(f"read/{rank}", "yes")
    store.wait([f"read/{peer}" for peer in range(world_size)], timedelta(hours=1))


meet()
rank = dist.get_rank()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
wait_until_all_have_read(dist.distributed_c10d._get_default_store(), rank, dist.get_world_size())
