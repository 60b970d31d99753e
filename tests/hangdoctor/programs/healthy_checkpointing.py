"""Rank 0 writes many checkpoints in small pieces, and its peer trains with it in between.

label: healthy
ranks: 2
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from hang_point import here


def save_checkpoint(folder: Path, step: int) -> None:
    for shard in range(20):
        torch.save(torch.ones(10_000), folder / f"step-{step % 2}-{shard}.pt")


dist.init_process_group("gloo")
folder = Path(tempfile.mkdtemp())
for step in range(10**9):
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 0:
        save_checkpoint(folder, step)
    dist.barrier()
    here()
