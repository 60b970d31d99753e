"""Rank 0 reduces a number for its log line; its peers are in the barrier after the epoch.

label: collective_mismatch
culprits: 0
ranks: 3
"""

import torch
import torch.distributed as dist
from hang_point import here


def log_loss(loss: torch.Tensor) -> None:
    dist.all_reduce(loss)
    print(f"loss {loss.item()}")


def train_step() -> torch.Tensor:
    gradient = torch.ones(4)
    dist.all_reduce(gradient)
    return gradient.sum()


dist.init_process_group("gloo")
for _ in range(3):
    loss = train_step()
here()
if dist.get_rank() == 0:
    log_loss(loss)
dist.barrier()
