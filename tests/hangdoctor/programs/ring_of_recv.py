"""Every rank receives from its left neighbour before it sends to its right one.

label: p2p_shape_mismatch
culprits: 0 1 2
ranks: 3
"""

import torch
import torch.distributed as dist
from hang_point import meet


def pass_keys_around(rank: int, world_size: int) -> None:
    keys = torch.ones(4)
    dist.recv(torch.empty(4), src=(rank - 1) % world_size)
    dist.send(keys, dst=(rank + 1) % world_size)


meet()
pass_keys_around(dist.get_rank(), dist.get_world_size())
