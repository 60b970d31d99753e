"""Rank 1 ends early and enters a barrier in an atexit handler while its peer still trains.

label: cleanup_deadlock
culprits: 1
ranks: 2
"""

import atexit

import torch
import torch.distributed as dist
from hang_point import here


def flush_and_leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def train(num_steps: int) -> None:
    for _ in range(num_steps):
        dist.all_reduce(torch.ones(4))


dist.init_process_group("gloo")
atexit.register(flush_and_leave)
rank = dist.get_rank()
train(num_steps=2)
here()
if rank != 1:
    train(num_steps=3)
