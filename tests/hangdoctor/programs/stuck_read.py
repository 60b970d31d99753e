"""Rank 0 reads a shard from storage that does not respond, in its own process; peers reduce.

label: dataloader_stall
culprits: 0
ranks: 2
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from hang_point import here
from torch.utils.data import DataLoader, Dataset


class Shards(Dataset):
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(list(self.paths[index].read_bytes()))


dist.init_process_group("gloo")
dist.barrier()
shard = Path(tempfile.mkdtemp(), "shard-0")
if dist.get_rank() == 0:
    os.mkfifo(shard)
else:
    shard.write_bytes(b"data")
here()
for batch in DataLoader(Shards([shard])):
    dist.all_reduce(batch)
