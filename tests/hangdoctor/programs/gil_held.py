"""A native extension on rank 1 blocks without releasing the GIL; its peers wait in the reduction.

label: lock_deadlock
culprits: 1
ranks: 2
"""

import ctypes

import torch
import torch.distributed as dist
from hang_point import meet

native = ctypes.PyDLL(None)  # PyDLL, unlike CDLL, keeps the GIL during the call


def tokenize_natively() -> None:
    native.pause()


meet()
if dist.get_rank() == 1:
    tokenize_natively()
dist.all_reduce(torch.ones(4))
