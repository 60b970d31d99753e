"""The network fails under an all_reduce: every rank waits in the same collective and line.

Runs inside a network namespace of its own, whose loopback device rank 0 takes down.

label: nccl_timeout
culprits: none
ranks: 2
launch: network_namespace
"""

import subprocess

import torch
import torch.distributed as dist
from hang_point import here


def reduce_gradients() -> None:
    dist.all_reduce(torch.ones(1 << 16))


dist.init_process_group("gloo")
reduce_gradients()
dist.barrier()
if dist.get_rank() == 0:
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
here()
reduce_gradients()
