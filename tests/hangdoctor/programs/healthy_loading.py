"""Data-loader workers that decode slowly but surely feed two ranks that train.

label: healthy
ranks: 2
"""

import time

import torch
import torch.distributed as dist
from hang_point import here
from torch.utils.data import DataLoader, Dataset


class SlowRows(Dataset):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.ones(4) * index


dist.init_process_group("gloo")
for batch in DataLoader(SlowRows(), batch_size=4, num_workers=1):
    dist.all_reduce(batch)
    here()
