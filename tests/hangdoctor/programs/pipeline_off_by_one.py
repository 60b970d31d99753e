"""Pipeline stages disagree on the number of micro-batches: one waits forward, one backward.

label: p2p_shape_mismatch
culprits: 0 1
ranks: 2
"""

import torch
import torch.distributed as dist
from hang_point import meet


def exchange(op: object, peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(op, torch.ones(4), peer)]):
        work.wait()


def first_stage(num_microbatches: int) -> None:
    for _ in range(num_microbatches):
        exchange(dist.isend, 1)
    for _ in range(num_microbatches):
        exchange(dist.irecv, 1)


def last_stage(num_microbatches: int) -> None:
    for _ in range(num_microbatches):
        exchange(dist.irecv, 0)
    for _ in range(num_microbatches):
        exchange(dist.isend, 0)


meet()
if dist.get_rank() == 0:
    first_stage(num_microbatches=3)
else:
    last_stage(num_microbatches=4)
