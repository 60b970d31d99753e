"""Rank 0 waits for an upload command that never ends; its peers wait in a barrier.

label: external_wait
culprits: 0
ranks: 2
"""

import subprocess

import torch.distributed as dist
from hang_point import meet


def upload_logs() -> None:
    subprocess.run(["sleep", "3600"], check=True)


meet()
if dist.get_rank() == 0:
    upload_logs()
dist.barrier()
