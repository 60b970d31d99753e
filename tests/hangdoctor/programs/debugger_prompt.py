"""Rank 1 raised and is in a post-mortem debugger without a user; its peers wait for it.

label: partial_exception
culprits: 1
ranks: 2
"""

import pdb

import torch
import torch.distributed as dist
from hang_point import here


def forward(rank: int) -> torch.Tensor:
    if rank == 1:
        raise ValueError("label 7 is outside the vocabulary")
    return torch.ones(4)


dist.init_process_group("gloo")
dist.barrier()
try:
    loss = forward(dist.get_rank())
except ValueError as error:
    here()
    pdb.post_mortem(error.__traceback__)
here()
dist.all_reduce(loss)
