"""Rank 0's `with` block joins an upload that never ends; peers wait in the last barrier.

label: cleanup_deadlock
culprits: 0
ranks: 2
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from hang_point import here

uploaded = threading.Event()


def upload_logs() -> None:
    uploaded.wait()


def train(rank: int) -> None:
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        with ThreadPoolExecutor(1) as uploads:
            uploads.submit(upload_logs)
            here()
    here()


dist.init_process_group("gloo")
train(dist.get_rank())
dist.barrier()
dist.destroy_process_group()
