"""Rank 1's data-loader worker was forked under a held lock and waits for it; rank 1 waits too.

label: dataloader_stall
culprits: 1
ranks: 2
"""

import threading

import torch
import torch.distributed as dist
from hang_point import here
from torch.utils.data import DataLoader, Dataset

cache_lock = threading.Lock()


class CachedRows(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        with cache_lock:
            return torch.ones(4) * index


def train_epoch(loader: DataLoader) -> None:
    for batch in loader:
        dist.all_reduce(batch)


dist.init_process_group("gloo")
dist.barrier()
loader = DataLoader(CachedRows(), num_workers=1, multiprocessing_context="fork")
here()
if dist.get_rank() == 1:
    cache_lock.acquire()
train_epoch(loader)
