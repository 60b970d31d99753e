"""All ranks wait in broadcast: rank 2 for metrics of rank 0, its peers for weights of rank 2.

label: collective_mismatch
culprits: 2
ranks: 3
"""

import torch
import torch.distributed as dist
from hang_point import meet


def receive_weights() -> None:
    dist.broadcast(torch.ones(16), src=2)


def receive_metrics() -> None:
    dist.broadcast(torch.ones(16), src=0)


meet()
if dist.get_rank() == 2:
    receive_metrics()
else:
    receive_weights()
