"""Rank 2 gathers and then broadcasts, its peers broadcast and then gather.

label: collective_mismatch
culprits: 2
ranks: 3
"""

import torch
import torch.distributed as dist
from hang_point import here


def share_config() -> None:
    dist.broadcast(torch.ones(4), src=2)


def gather_lengths() -> None:
    dist.all_gather([torch.ones(4) for _ in range(dist.get_world_size())], torch.ones(4))


dist.init_process_group("gloo")
dist.barrier()
order = [gather_lengths, share_config] if dist.get_rank() == 2 else [share_config, gather_lengths]
here()
for collective in order:
    collective()
