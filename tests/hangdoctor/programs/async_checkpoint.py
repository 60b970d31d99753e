"""Rank 0 waits for its checkpoint writer, whose storage does not respond; peers wait to train.

label: checkpoint_stall
culprits: 0
ranks: 2
"""

import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from hang_point import here


def save_checkpoint(state: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)


def wait_for_checkpoint(pending: Future) -> None:
    pending.result()


dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    path = Path(tempfile.mkdtemp(), "step-10.pt")
    os.mkfifo(path)
    pending = ThreadPoolExecutor(1, "checkpoint").submit(save_checkpoint, {"w": torch.ones(4)}, path)
    here()
    wait_for_checkpoint(pending)
here()
dist.all_reduce(torch.ones(4))
