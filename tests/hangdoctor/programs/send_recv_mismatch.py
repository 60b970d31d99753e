"""The sender cuts 8 activations into 2 chunks, the receiver expects 16 in 4: both end in recv.

label: p2p_shape_mismatch
culprits: 0 1
ranks: 2
"""

import torch
import torch.distributed as dist
from hang_point import meet

CHUNK = torch.ones(4)


def send_activations(length: int) -> None:
    for _ in range(length // len(CHUNK)):
        dist.send(CHUNK, dst=1)


def receive_activations(length: int) -> None:
    for _ in range(length // len(CHUNK)):
        dist.recv(CHUNK, src=0)


meet()
if dist.get_rank() == 0:
    send_activations(length=8)
    dist.recv(CHUNK, src=1)
else:
    receive_activations(length=16)
    dist.send(CHUNK, dst=0)
