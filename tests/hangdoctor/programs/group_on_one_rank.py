"""Rank 0 alone creates a process group, though every rank must; its peers train already.

label: init_deadlock
culprits: 0
ranks: 3
"""

import torch
import torch.distributed as dist
from hang_point import meet


def build_logging_group() -> dist.ProcessGroup:
    return dist.new_group([0, 1])


meet()
if dist.get_rank() == 0:
    build_logging_group()
dist.all_reduce(torch.ones(4))
