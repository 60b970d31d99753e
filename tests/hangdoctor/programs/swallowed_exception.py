"""Rank 1 swallows an error in its loss and enters a barrier in its clean-up; its peer reduces.

label: cleanup_deadlock
culprits: 1
ranks: 2
"""

import torch
import torch.distributed as dist
from hang_point import meet


def compute_loss(rank: int) -> torch.Tensor:
    if rank == 1:
        raise RuntimeError("out of memory")
    return torch.ones(8)


def train_step(rank: int) -> None:
    loss = compute_loss(rank)
    dist.all_reduce(loss)


def cleanup() -> None:
    dist.barrier()
    dist.destroy_process_group()


meet()
rank = dist.get_rank()
try:
    train_step(rank)
except RuntimeError as error:
    print(f"rank {rank}: {error}, leaving")
finally:
    cleanup()
