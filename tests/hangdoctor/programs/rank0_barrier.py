"""The logger has a barrier, and only rank 0 logs; its peers are in the next gradient reduction.

label: collective_mismatch
culprits: 0
ranks: 3
"""

import torch
import torch.distributed as dist
from hang_point import here


def log_step(step: int) -> None:
    dist.barrier()
    print(f"step {step}")


def train_step() -> None:
    dist.all_reduce(torch.ones(4))


dist.init_process_group("gloo")
train_step()
here()
if dist.get_rank() == 0:
    log_step(0)
train_step()
