"""Rank 0 leaves the loop with an asynchronous reduction in flight and waits for it in destroy.

label: cleanup_deadlock
culprits: 0
ranks: 2
"""

import torch
import torch.distributed as dist
from hang_point import here


def train(num_steps: int) -> None:
    for _ in range(num_steps):
        dist.barrier()


dist.init_process_group("gloo")
rank = dist.get_rank()
train(num_steps=2)
here()
if rank == 0:
    dist.all_reduce(torch.ones(4), async_op=True)
else:
    train(num_steps=1)
dist.destroy_process_group()
