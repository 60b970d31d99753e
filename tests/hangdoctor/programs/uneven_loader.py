"""Rank 2's loader has one batch less (no drop_last): it leaves the loop, its peers reduce.

label: collective_mismatch
culprits: 2
ranks: 3
"""

import torch
import torch.distributed as dist
from hang_point import here
from torch.utils.data import DataLoader


def reduce_gradients(batch: torch.Tensor) -> None:
    dist.all_reduce(batch.sum())


def train_epoch(loader: DataLoader) -> None:
    for step, batch in enumerate(loader):
        if step == 3:
            here()
        reduce_gradients(batch)
    here()


def end_epoch() -> None:
    dist.barrier()


dist.init_process_group("gloo")
num_rows = 12 if dist.get_rank() == 2 else 16
train_epoch(DataLoader(torch.arange(num_rows), batch_size=4))
end_epoch()
