"""Rank 1 is stopped (SIGSTOP by a debugger, a scheduler, a stray Ctrl-Z); its peers wait for it.

label: missing_rank
culprits: 1
ranks: 2
"""

import os
import signal

import torch
import torch.distributed as dist
from hang_point import meet

meet()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(4))
