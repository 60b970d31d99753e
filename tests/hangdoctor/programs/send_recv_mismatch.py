"""The sender cuts the sequence into 2 chunks and the receiver expects 4: both end in recv.

label: p2p_shape_mismatch
culprits: 0 1
ranks: 2
"""

import torch
import torch.distributed as dist
from hang_point import here

SEQUENCE = torch.ones(8)


def send_activations(num_chunks: int) -> None:
    for chunk in SEQUENCE.chunk(num_chunks):
        dist.send(chunk.contiguous(), dst=1)


def receive_activations(num_chunks: int) -> None:
    for chunk in SEQUENCE.chunk(num_chunks):
        dist.recv(torch.empty_like(chunk).repeat(2)[: 8 // num_chunks + 2], src=0)


def main() -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    here()
    if dist.get_rank() == 0:
        send_activations(num_chunks=2)
        dist.recv(SEQUENCE, src=1)
    else:
        receive_activations(num_chunks=4)
        dist.send(SEQUENCE, dst=0)


main()
