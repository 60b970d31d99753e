"""Rank 1 runs out of memory and keeps retrying the step by itself while its peers reduce gradients.

label: partial_exception
culprits: 1
ranks: 2
"""

import time

import torch
import torch.distributed as dist
from hang_point import here


def forward(rank: int) -> torch.Tensor:
    if rank == 1:
        raise RuntimeError("out of memory")
    return torch.ones(4)


def step_with_retries(rank: int) -> torch.Tensor:
    while True:
        try:
            return forward(rank)
        except RuntimeError as error:
            wait_before_retry(error)


def wait_before_retry(error: RuntimeError) -> None:
    print(f"{error}; trying again")
    here()
    time.sleep(60)


dist.init_process_group("gloo")
dist.barrier()
loss = step_with_retries(dist.get_rank())
here()
dist.all_reduce(loss)
