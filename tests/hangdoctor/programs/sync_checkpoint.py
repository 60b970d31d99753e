"""Rank 0 writes the checkpoint to storage that does not respond; peers wait in the barrier.

label: checkpoint_stall
culprits: 0
ranks: 2
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from hang_point import here


def save_checkpoint(path: Path) -> None:
    if dist.get_rank() == 0:
        os.mkfifo(path)
        here()
        with path.open("wb") as file:
            torch.save({"w": torch.ones(4)}, file)
    here()
    dist.barrier()


dist.init_process_group("gloo")
save_checkpoint(Path(tempfile.mkdtemp(), "step-10.pt"))
